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


def shared(few: Intervals, many: Intervals) -> int:
    """The same as `overlap` where the one has few intervals and the other many."""
    return int((length_until(many, few.end) - length_until(many, few.start)).sum())


def both(one: Intervals, other: Intervals) -> Intervals:
    """All instants of either."""
    return union(np.concatenate([one.start, other.start]), np.concatenate([one.end, other.end]))


def minus(one: Intervals, other: Intervals) -> int:
    """Nanoseconds of `one` that `other` does not cover."""
    return both(one, other).length - other.length


def common(one: Intervals, other: Intervals) -> Intervals:
    """All instants of both."""
    return _chosen(one, other, inside=True)


def without(one: Intervals, other: Intervals) -> Intervals:
    """All instants of `one` that `other` does not cover."""
    return _chosen(one, other, inside=False)


def _chosen(one: Intervals, other: Intervals, inside: bool) -> Intervals:
    edges = np.unique(np.concatenate([*one, *other]))
    begin, end = edges[:-1], edges[1:]
    kept = holds(one, begin) & (holds(other, begin) == inside)
    return union(begin[kept], end[kept])


def holds(one: Intervals, moments: Nanoseconds) -> npt.NDArray[np.bool_]:
    """Which moments lie in it."""
    if not len(one.start):
        return np.zeros(len(moments), dtype=np.bool_)
    index = np.searchsorted(one.start, moments, side="right") - 1
    found: npt.NDArray[np.bool_] = (index >= 0) & (moments < one.end[np.maximum(index, 0)])
    return found


def length_until(one: Intervals, moments: Nanoseconds) -> Nanoseconds:
    """Nanoseconds of it that lie before each moment."""
    if not len(one.start):
        return np.zeros(len(moments), dtype=np.int64)
    sums = np.concatenate([[0], np.cumsum(one.end - one.start)])
    index = np.searchsorted(one.start, moments, side="right")
    # What the last interval begun by then has beyond the moment is not before it.
    beyond = np.maximum(one.end[np.maximum(index - 1, 0)] - moments, 0)
    found: Nanoseconds = sums[index] - np.where(index > 0, beyond, 0)
    return found
