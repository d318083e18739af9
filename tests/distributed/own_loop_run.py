"""One rank of examples/own_loop.py: notes what it trains on, and dies after a save if asked to."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwise

DIE_AFTER = int(os.environ.get("DIE_AFTER_SAVES", "0"))
parallelize, save = shardwise.parallelize, dcp.save
# The first token of each sequence names it.
sequences: list[list[int]] = []
saves = 0


def noting_parallelize(*args: Any, **settings: Any) -> nn.Module:
    model = parallelize(*args, **settings)
    model.register_forward_pre_hook(lambda _, inputs: sequences.append(inputs[0][:, 0].tolist()))
    return model


def deadly_save(*args: Any, **settings: Any) -> None:
    global saves  # noqa: PLW0603
    save(*args, **settings)
    saves += 1
    if saves == DIE_AFTER:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    shardwise.parallelize = noting_parallelize  # type: ignore[assignment]
    dcp.save = deadly_save  # type: ignore[assignment]
    runpy.run_path(sys.argv[1], run_name="__main__")
    Path(f"sequences-{dist.get_rank()}.json").write_text(json.dumps(sequences))
