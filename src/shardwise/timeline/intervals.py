"""Sets of instants as sorted, disjoint intervals of int64 nanoseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]


class Intervals(NamedTuple):
    """Half-open, sorted, neither overlapping nor touching."""

    start: Nanoseconds
    end: Nanoseconds

    @property
    def length(self) -> int:
        return int((self.end - self.start).sum())


def union(start: Nanoseconds, end: Nanoseconds) -> Intervals:
    """All instants covered by at least one of the given spans."""
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return Intervals(start, end)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    begins = np.concatenate([[True], start[1:] > reach[:-1]])
    first = np.flatnonzero(begins)
    last = np.concatenate([first[1:] - 1, [len(start) - 1]])
    return Intervals(start[first], reach[last])


def overlap(one: Intervals, other: Intervals) -> int:
    """Nanoseconds that lie in both."""
    return one.length + other.length - both(one, other).length


def both(one: Intervals, other: Intervals) -> Intervals:
    """All instants of either."""
    return union(np.concatenate([one.start, other.start]), np.concatenate([one.end, other.end]))


def minus(one: Intervals, other: Intervals) -> int:
    """Nanoseconds of `one` that `other` does not cover."""
    return both(one, other).length - other.length
