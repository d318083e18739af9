"""What all ranks agree on before each step, in one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from shardwise.engine.rank_tree import shared_tree
from shardwise.trainer.data.batches import MicroBatch

# Why training ended. It is "resizing" if other hosts join.
Reason = Literal["done", "stopped", "resizing", "data ended"]
# Five 64-bit integers.
AGREEMENT_BYTES = 40
# Unit of the count of resize requests in `ends`; larger than any number of ranks.
_RESIZE = 2**32


class UnequalDataError(RuntimeError):
    """Ranks have different numbers of micro-batches; training would hang."""


class StepDecision(NamedTuple):
    """What all ranks agreed on before a step: the same values on every rank.

    `tokens` are the tokens that count for the loss, on all ranks; `micro_batches` are those of one
    rank, the one with the largest share. `stop`, `save` and `resize` are true if any rank asked
    for it.
    """

    tokens: int
    micro_batches: int
    stop: bool
    save: bool
    resize: bool

    @property
    def end(self) -> Reason | None:
        """Why training ends before this step; None if it continues."""
        if self.stop:
            return "stopped"
        if self.resize:
            return "resizing"
        return "data ended" if self.micro_batches < 1 else None


class Agreement:
    """An all-reduce of what the ranks need before a step, started one step early to hide latency.

    It runs on the CPU: no rank waits for its device. `step` is counted from 1, and `copies` is the
    number of ranks that have the same sequences: those of a context and tensor group. `fewer` is
    by how many micro-batches this rank's share is smaller than the largest.
    """

    def __init__(
        self,
        step: int,
        batches: Sequence[MicroBatch],
        stop: bool,
        save: bool = False,
        copies: int = 1,
        resize: bool = False,
        fewer: int = 0,
    ) -> None:
        self.step, self._copies = step, copies
        self.count = len(batches) + fewer if batches else 0
        tokens = sum(batch.tokens for batch in batches)
        # Counts are equal if and only if the mean of their squares is the square of their mean,
        # so that sums are enough. One integer counts both kinds of requests to end.
        ends = int(stop) + _RESIZE * int(resize)
        values = [tokens, ends, int(save), self.count, self.count**2]
        self._values = torch.tensor(values, dtype=torch.int64)
        self._tree = shared_tree()
        self._wait = self._tree.start_all_reduce(self._values)

    def result(self) -> StepDecision:
        """Wait for the all-reduce; return the values that all ranks agreed on.

        Raises:
            UnequalDataError: Ranks have different numbers of micro-batches.
        """
        self._wait()
        size = self._tree.size
        tokens, ends, saves, counts, squares = self._values.tolist()
        resizes, stops = divmod(ends, _RESIZE)
        if size * squares != counts**2:
            raise UnequalDataError(self._describe_counts())
        return StepDecision(
            tokens // self._copies, counts // size, stops > 0, saves > 0, resizes > 0
        )

    def _describe_counts(self) -> str:
        """The error message that names the ranks with fewer micro-batches.

        Every rank must call this: it gathers the counts of all ranks.
        """
        gathered = torch.zeros(self._tree.size, dtype=torch.int64)
        gathered[self._tree.rank] = self.count
        self._tree.all_reduce(gathered)
        counts = gathered.tolist()
        most = max(counts)
        short = [f"rank {rank} has {n}" for rank, n in enumerate(counts) if n < most]
        return (
            f"Ranks have unequal data in step {self.step}: "
            f"{', '.join(short[:4])}{' …' if len(short) > 4 else ''} micro-batches, others have "
            f"{most}; give every rank the same number of batches"
        )
