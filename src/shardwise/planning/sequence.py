"""The longest sequence that fits."""

from __future__ import annotations

from shardwise.planning.problem import Problem
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.spec.record import SpecError

# What takes the least memory; the rest is searched once the length is known.
_SMALLEST = Space(recompute=("full",), micro_batches=(1,), prefetch=(0, 1), blocks_per_unit=(1,))
STEP = 512
MOST = 2**24


def longest(problem: Problem) -> int | None:
    """Tokens of the longest sequence, a multiple of 512; None where not even that fits."""

    def fits(blocks: int) -> bool:
        try:
            job = problem.job.but(seq_len=blocks * STEP)
            return Search(problem._replace(job=job), _SMALLEST).run().best() is not None
        except SpecError:  # a global batch smaller than one sequence per device
            return False

    low, high = 0, 1
    while high * STEP <= MOST and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP or None
