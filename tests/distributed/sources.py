"""Data and models that tests name by `package.module:function`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import torch
from torch import nn

VOCAB, SEQ_LEN = 64, 16
LATE_SEQ_LEN = 64
# The moments of a run in which a rank is late.
LATE_FIRST, LATE_STEPS, LATE_EVERY = 10, 3, 6
POISON = VOCAB - 1


def equal(rank: int, world: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.arange(SEQ_LEN + 1).repeat(2, 1) % POISON


def unequal(rank: int, world: int) -> Iterator[torch.Tensor]:
    """Rank 1 has one micro-batch less: five instead of six."""
    for _ in range(6 - rank):
        yield torch.arange(SEQ_LEN + 1).repeat(2, 1) % POISON


def poisoned(rank: int, world: int) -> Iterator[torch.Tensor]:
    """The fourth batch of rank 1 alone holds the token that breaks `fragile`."""
    for number in range(12):
        ids = torch.arange(SEQ_LEN + 1).repeat(2, 1) % POISON
        if number == 3 and rank == 1:
            ids[0, 3] = POISON
        yield ids


class Fragile(nn.Module):
    """Its loss is not a number for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        broken = (ids == POISON).to(x.dtype)[..., None]
        return self.head(x / (1 - broken))


def fragile() -> nn.Module:
    return Fragile()


class Delay:
    """Makes one rank late, once a step, as SLOW_CASES says: "data:0.2,host:0.5" and so on.

    Each moment that is profiled, and the steps around it, belongs to one case: a kind, and a share
    of a step by which SLOW_RANK is late. How long a step takes is seen in the first ones.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._step = kind, -1
        self._here = os.environ.get("RANK") == os.environ.get("SLOW_RANK")
        told = [case.split(":") for case in os.environ.get("SLOW_CASES", "").split(",") if case]
        self._cases = [(kind, float(share)) for kind, share in told]
        self._seen: list[float] = []

    def seconds(self) -> float:
        """How long to be late in this step."""
        self._step += 1
        if not self._here:
            return 0.0
        # From two steps before a moment on: one warms up, and data is read a step ahead.
        case = (self._step - (LATE_FIRST - 2)) // LATE_EVERY
        if case < 0:
            self._seen.append(time.perf_counter())
            return 0.0
        if case >= len(self._cases) or self._cases[case][0] != self._kind:
            return 0.0
        # The first steps set things up.
        steps = [after - before for before, after in pairwise(self._seen[2:])]
        return self._cases[case][1] * median(steps)


def late(rank: int, world: int) -> Iterator[torch.Tensor]:
    """Data of `Late`; slow to come in cases of "data"."""
    delay = Delay("data")
    while True:
        time.sleep(delay.seconds())
        yield torch.arange(LATE_SEQ_LEN + 1).repeat(8, 1) % VOCAB


class Late(nn.Module):
    """Sleeps in its forward in cases of "host", and computes more in cases of "compute"."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 256)
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
        self.head = nn.Linear(256, VOCAB, bias=False)
        self.sleep, self.more = Delay("host"), Delay("compute")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        time.sleep(self.sleep.seconds())
        # Of this thread's own time: on a busy machine a second of the clock holds less computing.
        end = time.thread_time() + self.more.seconds()
        while time.thread_time() < end:
            x.detach().flatten(0, 1) @ x.detach().flatten(0, 1).T
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def late_model() -> nn.Module:
    return Late()


class Moody(Fragile):
    """Hangs with a batch of eight, and dies with one of four as if memory had run out."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not ids.is_meta and len(ids) == 8:
            time.sleep(3600)
        if not ids.is_meta and len(ids) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(ids % POISON)


def moody_model() -> nn.Module:
    return Moody()
