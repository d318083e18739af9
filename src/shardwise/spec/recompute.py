"""The share of blocks that recompute: as a count, and as words."""

from __future__ import annotations

import fractions
from typing import Any


def show_recompute(recompute: str | float, blocks: int | None = None) -> str:
    """A recompute policy as text: "full", "28 of 32 blocks"; without `blocks` "7/8 of blocks"."""
    if isinstance(recompute, str):
        return recompute
    share = show_recomputed_share(recompute, blocks)
    return f"{share} of blocks" if blocks is None else f"{share} blocks"


def show_recomputed_share(share: float, blocks: int | None) -> str:
    """A share of recomputed blocks as text: "28 of 32", or "7/8" if `blocks` is None."""
    if blocks is None:
        return str(fractions.Fraction(share).limit_denominator(1000))
    return f"{int(blocks_of_share(share, blocks))} of {blocks}"


def blocks_of_share(share: Any, count: int) -> Any:
    """The number of blocks in a share of `count` blocks, rounded up; also for an array of shares.

    The small addend corrects the rounding of shares such as 0.1 * 30. The first blocks recompute:
    when the backward reaches them, activations saved by later blocks have been freed, and the
    working set of recomputation takes their place.
    """
    return -((1e-9 - share * count) // 1)
