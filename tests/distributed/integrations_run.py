"""Runs an example as it is, and tells what its watch predicted and measured: started by torchrun.

`python integrations_run.py EXAMPLE [fsdp2]`; with `fsdp2`, accelerate shards, as it does on GPUs.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import accelerate
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from shardwise.engine.mesh import leave


def shard_on_cpus() -> None:
    """Accelerate has FSDP on GPUs only; what it does to a model is the same on a CPU."""
    before = accelerate.Accelerator.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=os.environ.get("RESHARD", "true") == "true",
        )
        self.state.fsdp_plugin = plugin
        self.state.distributed_type = DistributedType.FSDP
        # Where accelerate itself notes it, for all that asks later.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    accelerate.Accelerator.__init__ = made  # type: ignore[method-assign]


def main() -> None:
    if sys.argv[2:] == ["fsdp2"]:
        shard_on_cpus()
    rank = int(os.environ["RANK"])
    example = runpy.run_path(sys.argv[1], run_name="__main__")
    watch = example["watched"].watch if "watched" in example else example["watch"]
    trainer = example.get("trainer")
    measured = watch.measured()
    assert measured is not None
    history = getattr(getattr(trainer, "state", None), "log_history", [])
    metrics = getattr(trainer, "logged_metrics", {})
    result = {
        "predicted": watch.predicted.to_dict(),
        "measured": measured.to_dict(),
        "metrics": {key: float(value) for key, value in metrics.items()},
        "history": history,
    }
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    leave()


if __name__ == "__main__":
    main()
