"""Trains what was exported for Lightning, and tells what became of the model: started by torchrun.

The folder it runs in holds `lightning_run.py` as `shardwise export` wrote it.
"""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from shardwise.engine.counter import CollectiveCounter


class Counts(Callback):
    """Collectives of the second optimizer step."""

    def __init__(self, accumulate: int) -> None:
        self.counter, self.accumulate, self.wrapped = CollectiveCounter(), accumulate, ""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.wrapped = type(trainer.strategy.model).__name__
        if index == self.accumulate:
            self.counter.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 2 * self.accumulate - 1:
            self.counter.__exit__(None, None, None)


def main() -> None:
    spec = importlib.util.spec_from_file_location("exported", "lightning_run.py")
    assert spec is not None
    assert spec.loader is not None
    exported: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    trainer, module = exported.make_trainer(), exported.Training()
    counts = Counts(exported.ACCUMULATE)
    trainer.callbacks.append(counts)
    trainer.fit(module)
    parameters = dict(module.model.named_parameters())
    sharded: dict[str, Any] = {
        name: [list(p.placements[-1:] if len(p.placements) > 1 else p.placements), p.to_local()]
        for name, p in parameters.items()
        if isinstance(p, DTensor)
    }
    result = {
        "parameters": sum(p.numel() for p in parameters.values()),
        "sharded": len(sharded),
        "tensors": len(parameters),
        "placements": sorted({str(placement) for [p], _ in sharded.values() for placement in [p]}),
        "local": sum(local.numel() for _, local in sharded.values()),
        "wrapped": counts.wrapped,
        "counted": {f"{op}/{size}": n.calls for (op, size, _), n in counts.counter.counts.items()},
    }
    trainer.save_checkpoint("saved")
    if dist.get_rank() == 0:
        [file] = Path("trained").rglob("metrics.csv")
        with file.open() as rows:
            result["losses"] = [float(row["loss"]) for row in csv.DictReader(rows) if row["loss"]]
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
