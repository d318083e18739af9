"""Data of runs with tensor parallelism, and the fault that it injects into one of their ranks.

Ranks of a tensor group get the same data, so the fault is planted by the rank of the process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import torch

from benchmarks.faults.plant import SEQ_LEN, SEQUENCES, VOCAB, planted


def batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    """Batches as a function of data rank and position, so that repeats and gaps change the loss."""
    planted.plant(int(os.environ["RANK"]))
    return (_batch(rank, number) for number in itertools.count())


def _batch(rank: int, number: int) -> torch.Tensor:
    planted.step = number
    # Data is read a step ahead, while the other ranks are in the middle of one.
    planted.reach("mid-step")
    chance = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=chance)
