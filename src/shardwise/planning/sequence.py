"""The longest sequence that fits."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.planning.problem import Problem
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.spec.record import SpecError

# What takes the least memory; the rest is searched once the length is known.
_SMALLEST = Space(recompute=("full",), micro_batches=(1,), prefetch=(0, 1), blocks_per_unit=(1,))
STEP = 512
MOST = 2**24


class Longest(NamedTuple):
    """A length, and what keeps it from being longer, in a sentence."""

    tokens: int
    why_not_longer: str


def longest(problem: Problem) -> Longest | None:
    """The longest sequence, a multiple of 512; None where not even that fits."""
    refused: dict[int, str] = {}

    def fits(blocks: int) -> bool:
        try:
            job = problem.job.but(seq_len=blocks * STEP)
            found = Search(problem._replace(job=job), _SMALLEST).run().best()
        except SpecError as error:  # the batch is too small, or the model has no more positions
            refused[blocks] = f"beyond that, {error.problems[0]}."
            return False
        if found is None:
            refused[blocks] = "more does not fit."
        return found is not None

    low, high = 0, 1
    while high * STEP <= MOST and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        return None
    reason = refused.get(high, "longer ones were not looked at.")
    positions = getattr(problem.model, "max_positions", None)
    if positions is not None and low * STEP > positions:
        reason += f" The model was made for {positions:,}."
    return Longest(low * STEP, reason)
