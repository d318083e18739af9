"""Model and data for runs of the fault matrix, and the fault injected into them.

A run.toml names the data of this file. When a rank opens it, the fault in the variable FAULT is
installed, as `kind@moment:rank`. It happens once, or every time if the kind starts with `every`.
The file in the variable MARK shows that it happened.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCAB, SEQ_LEN, SEQUENCES = 64, 16, 2
FAULT, MARK = "SHARDWISE_PLANTED_FAULT", "SHARDWISE_PLANTED_MARK"
# Additional seconds of the first step, and of every step.
FIRST_STEP_S, STEP_S = "SHARDWISE_PLANTED_FIRST_STEP_S", "SHARDWISE_PLANTED_STEP_S"
# A run.toml for the model and data of this file; `train` takes more settings.
RUN = f"""
cluster = "1x2xCPU"
model = "benchmarks.faults.plant:small"
job = {{{{ seq_len = {SEQ_LEN} }}}}
strategy = {{{{ kind = "zero3", micro_batch = {SEQUENCES}, param_dtype = "fp32" }}}}
data = {{{{ source = "benchmarks.faults.plant:batches" }}}}

[train]
steps = 30
learning_rate = 1e-2
log_every = 1
trackers = []
measure = false
{{train}}
"""
# Completed steps before a fault in a step; other faults happen around the second save.
STEP = 15


class Small(nn.Module):
    """A model whose tensors shard unevenly. With `poisonous`, one token makes its loss NaN."""

    def __init__(self, poisonous: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.poison = VOCAB - 1 if poisonous else VOCAB
        self.table = nn.Embedding(VOCAB, 17)
        self.layers = nn.ModuleList([nn.Linear(17, 17) for _ in range(3)])
        self.head = nn.Linear(17, VOCAB, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        planted.reach("mid-step")
        x = self.table(ids)
        for layer in self.layers:
            x = x + self.drop(layer(x).tanh())
        return self.head(x / (ids != self.poison).to(x.dtype)[..., None])


def small() -> nn.Module:
    return Small()


def steady() -> nn.Module:
    """A model without a poisonous token."""
    return Small(poisonous=False)


def plain() -> nn.Module:
    """A model without random numbers, equal on any number of processes."""
    return Small(poisonous=False, dropout=0.0)


def batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    """Batches as a function of rank and position, so that repeats and gaps change the loss."""
    planted.plant(rank)
    return (_batch(rank, number) for number in itertools.count())


def _batch(rank: int, number: int) -> torch.Tensor:
    # Data is read a step ahead.
    planted.step = number - 1
    chance = torch.Generator().manual_seed(1000 * number + rank)
    ids = torch.randint(0, VOCAB - 1, (SEQUENCES, SEQ_LEN + 1), generator=chance)
    if planted.is_due("data", number):
        ids[0, 3] = VOCAB - 1
        planted.mark()
    return ids


class _Planted:
    """The fault of this process."""

    def __init__(self) -> None:
        self.kind = self.moment = ""
        self.step = self.saves = 0
        self.first_step_s = float(os.environ.get(FIRST_STEP_S, "0"))
        self.step_s = float(os.environ.get(STEP_S, "0"))

    def plant(self, rank: int) -> None:
        fault = os.environ.get(FAULT, "")
        if not fault or (Path(os.environ[MARK]).exists() and not fault.startswith("every ")):
            return
        kind, _, rest = fault.partition("@")
        moment, _, where = rest.partition(":")
        if rank == int(where):
            self.kind, self.moment = kind, moment
            _hook()

    def is_due(self, moment: str, step: int) -> bool:
        here = moment == self.moment and step == STEP
        return here and not Path(os.environ[MARK]).exists()

    def reach(self, moment: str) -> None:
        """Inject the fault if this is its moment."""
        if moment == "mid-step":
            time.sleep(self.first_step_s + self.step_s)
            self.first_step_s = 0.0
        if not self.kind or moment != self.moment:
            return
        if moment == "mid-step":
            if self.step < STEP and self.kind != "slow":
                return
        elif moment != "during load" and self.saves < 2:
            return
        if self.kind == "slow":
            self.mark()
            time.sleep(0.3)
            return
        if Path(os.environ[MARK]).exists() and not self.kind.startswith("every "):
            return
        self.mark()
        _FAULTS[self.kind.removeprefix("every ")]()

    def mark(self) -> None:
        Path(os.environ[MARK]).touch()


planted = _Planted()


def _hook() -> None:
    """Wrap the functions that save and load."""
    from shardwise.checkpoint.dcp.reader import CheckpointReader
    from shardwise.checkpoint.dcp.save import Saver
    from shardwise.checkpoint.format.storage import LocalStorage

    def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            if name == "save":
                planted.saves += 1
            if before:
                planted.reach(before)
            found = inner(*args, **kwargs)
            if after:
                planted.reach(after)
            return found

        setattr(owner, name, outer)

    around(Saver, "save", before="before save")
    around(LocalStorage, "commit", before="before commit", after="after commit")
    around(CheckpointReader, "read_data", before="during load")
    inner_create = LocalStorage.create

    def create(place: LocalStorage, step: int, name: str) -> Any:
        file: Any = inner_create(place, step, name)
        inner_write, count = file.write, 0

        def write(data: Any) -> None:
            nonlocal count
            count += 1
            if count == 3:
                planted.reach("during shard write")
            inner_write(data)

        file.write = write
        return file

    LocalStorage.create = create  # type: ignore[method-assign, assignment]


def _raise() -> None:
    raise RuntimeError("a planted exception")


def _segfault() -> None:
    ctypes.string_at(0)


def _fail_io() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "a-planted-file")


_FAULTS: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": _raise,
    "segfault": _segfault,
    "sleep": lambda: time.sleep(3600),
    "pause": lambda: time.sleep(3),
    "EIO": _fail_io,
}
