"""A model whose process writes a digest of its state after every update.

A run.toml names `model`. Each rank adds a line to a file in the folder of the variable DIGESTS: the
step, a checksum of its parameters and optimizer states, and the time. The variable COMMIT_S makes
checkpoints slow.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.faults.plant import Small
from shardwise.checkpoint.format.storage import LocalStorage
from shardwise.pytorch.private import local_tensor

DIGESTS = "SHARDWISE_DIGESTS"
# Seconds that a disk takes to commit a checkpoint.
COMMIT_S = "SHARDWISE_PLANTED_COMMIT_S"
# Seconds that a step waits, so that a group that returns finds free cores.
PAUSE_S = 0.1
_registered: list[Path] = []


def model() -> nn.Module:
    """A model with dropout, so that random numbers count too."""
    folder = os.environ.get(DIGESTS)
    # A process may build the model more than once.
    if folder is not None and not _registered:
        group, rank = os.environ.get("SHARDWISE_REPLICA", "0"), os.environ.get("RANK", "0")
        path = Path(folder, f"{group}-{rank}-{os.getpid()}.jsonl")
        _registered.append(path)
        register_optimizer_step_post_hook(lambda optimizer, *_: write_digest(optimizer, path))
        _slow_down_commits(float(os.environ.get(COMMIT_S, "0")))
    module = Small(poisonous=False)
    module.register_forward_pre_hook(lambda *_: time.sleep(PAUSE_S))
    return module


def _slow_down_commits(seconds: float) -> None:
    commit = LocalStorage.commit

    def slow_commit(place: LocalStorage, step: int, data: bytes) -> None:
        time.sleep(seconds)
        commit(place, step, data)

    LocalStorage.commit = slow_commit  # type: ignore[method-assign, assignment]


def write_digest(optimizer: Any, path: Path) -> None:
    line = {"step": step_of(optimizer), "digest": digest(optimizer), "at": time.time()}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step_of(optimizer: Any) -> int:
    return int(optimizer.state[parameters(optimizer)[0]]["step"])


def digest(optimizer: Any) -> int:
    """A checksum of the parameters and optimizer states of this rank."""
    value = 0
    for parameter in parameters(optimizer):
        for tensor in (
            parameter,
            *(optimizer.state[parameter][k] for k in ("exp_avg", "exp_avg_sq")),
        ):
            data = local_tensor(tensor).detach().contiguous().numpy().tobytes()
            value = zlib.crc32(data, value)
    return value
