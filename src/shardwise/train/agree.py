"""What all ranks settle once per step, in one small all-reduce, before anyone starts the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.engine.mesh import world
from shardwise.train.batches import MicroBatch

# Five 64-bit integers.
AGREEMENT_BYTES = 40


class UnequalDataError(RuntimeError):
    """Ranks hold different numbers of micro-batches; going on would hang."""


class Agreed(NamedTuple):
    """The same on every rank."""

    tokens: int
    micro_batches: int
    stop: bool
    save: bool


class Agreement:
    """Started before a step and awaited at its beginning, so that its latency hides behind compute.

    It runs on the CPU: no rank waits for its device to take part.
    """

    def __init__(
        self, step: int, batches: Sequence[MicroBatch], stop: bool, save: bool = False
    ) -> None:
        self.step, self.count = step, len(batches)
        tokens = sum(batch.tokens for batch in batches)
        # Counts are equal exactly if the mean of their squares is the square of their mean, so
        # that one sum decides.
        facts = [tokens, int(stop), int(save), self.count, self.count**2]
        self._facts = torch.tensor(facts, dtype=torch.int64)
        self._work: Any = None
        if world()[1] > 1:
            self._work = dist.all_reduce(self._facts, async_op=True)

    def result(self) -> Agreed:
        if self._work is not None:
            self._work.wait()
        size = world()[1]
        tokens, stops, saves, counts, squares = self._facts.tolist()
        if size * squares != counts**2:
            raise UnequalDataError(self._who())
        return Agreed(tokens, counts // size, stops > 0, saves > 0)

    def _who(self) -> str:
        """Every rank comes here, so they can still tell each other how many each has."""
        own = torch.tensor([self.count])
        found = [torch.zeros_like(own) for _ in range(world()[1])]
        dist.all_gather(found, own)
        counts = [int(count) for count in found]
        most = max(counts)
        short = [f"rank {rank} has {n}" for rank, n in enumerate(counts) if n < most]
        return (
            f"step {self.step}: {', '.join(short[:4])}{' …' if len(short) > 4 else ''} "
            f"micro-batches where others have {most}; give every rank the same number, or repeat "
            "or drop the last ones"
        )
