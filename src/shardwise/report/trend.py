"""The course of a value, as bars in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_LEVELS = "▁▂▃▄▅▆▇█"


def trend(values: Sequence[float], width: int) -> str:
    """The values as at most `width` bars, from the lowest value to the highest.

    More values than bars are averaged in groups. Values that are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 1:
        return ""
    edges = [number * len(finite) // count for number in range(count + 1)]
    parts = [finite[first:last] for first, last in pairwise(edges)]
    means = [math.fsum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    steps = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * steps)] for mean in means)
