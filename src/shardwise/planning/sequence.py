"""The longest sequence that fits."""

from __future__ import annotations

from shardwise.planning.problem import Problem
from shardwise.planning.reasons.warnings import LongestSequence
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.spec.record import SpecError

STEP = 512
MOST = 2**24


def longest(problem: Problem, space: Space | None = None) -> LongestSequence | None:
    """The longest sequence length that fits, a multiple of 512 tokens; None if 512 does not fit."""
    refused: dict[int, str] = {}
    # Activations between blocks are smallest if as many devices as possible share a sequence.
    smallest = (space or Space()).least_memory()._replace(most_divided=True)

    def fits(blocks: int) -> bool:
        try:
            job = problem.job.but(seq_len=blocks * STEP)
            found = Search(problem._replace(job=job), smallest).run().best()
        except SpecError as error:  # the batch is too small, or the model has no more positions
            refused[blocks] = error.problems[0]
            return False
        return found is not None

    low, high = 0, 1
    while high * STEP <= MOST and fits(high):
        low, high = high, high * 2
    searched = high * STEP > MOST
    while high - low > 1 and not searched:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        return None
    tokens, positions = low * STEP, getattr(problem.model, "max_positions", None)
    return LongestSequence(
        tokens=tokens,
        limited_by="search" if searched else "input" if high in refused else "memory",
        refused=refused.get(high),
        positions=positions if positions is not None and tokens > positions else None,
    )
