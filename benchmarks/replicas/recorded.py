"""A model whose process writes a digest of its state after every update.

A run.toml names `model`. Each rank adds a line to a file in the folder of the variable DIGESTS: the
step, a checksum of its parameters and optimizer states, and the time.
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
from shardwise.engine.torch_private import local_tensor

DIGESTS = "SHARDWISE_DIGESTS"


def model() -> nn.Module:
    """A model with dropout, so that random numbers count too."""
    if (folder := os.environ.get(DIGESTS)) is not None:
        group, rank = os.environ.get("SHARDWISE_REPLICA", "0"), os.environ.get("RANK", "0")
        path = Path(folder, f"{group}-{rank}-{os.getpid()}.jsonl")
        register_optimizer_step_post_hook(lambda optimizer, *_: write_digest(optimizer, path))
    return Small(poisonous=False)


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
