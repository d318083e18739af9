"""Sets of instants as sorted, disjoint intervals of int64 nanoseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]


class Intervals(NamedTuple):
    """Half-open intervals: sorted, not overlapping, not touching."""

    start: Nanoseconds
    end: Nanoseconds

    @property
    def length(self) -> int:
        """Total nanoseconds of all intervals."""
        return int((self.end - self.start).sum())


def union(start: Nanoseconds, end: Nanoseconds) -> Intervals:
    """The union of spans as Intervals; spans may overlap and be in any order."""
    nonempty = end > start
    start, end = start[nonempty], end[nonempty]
    if not len(start):
        return Intervals(start, end)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(start) - 1]])
    return Intervals(start[first], reach[last])


def merge(one: Intervals, other: Intervals) -> Intervals:
    """The union of two sets of intervals."""
    return union(np.concatenate([one.start, other.start]), np.concatenate([one.end, other.end]))


def overlap_length(one: Intervals, other: Intervals) -> int:
    """Nanoseconds covered by both; fastest when `one` has fewer intervals than `other`."""
    return int((length_before(other, one.end) - length_before(other, one.start)).sum())


def uncovered_length(one: Intervals, other: Intervals) -> int:
    """Nanoseconds of `one` that `other` does not cover."""
    return one.length - overlap_length(one, other)


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The intersection of two sets of intervals."""
    return _select(one, other, inside=True)


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The parts of `one` that `other` does not cover."""
    return _select(one, other, inside=False)


def _select(one: Intervals, other: Intervals, inside: bool) -> Intervals:
    """The parts of `one` that are inside `other`, or outside of `other`."""
    edges = np.unique(np.concatenate([*one, *other]))
    start, end = edges[:-1], edges[1:]
    kept = contains(one, start) & (contains(other, start) == inside)
    return union(start[kept], end[kept])


def contains(one: Intervals, times: Nanoseconds) -> npt.NDArray[np.bool_]:
    """For each of `times`, whether it is in an interval: a mask."""
    if not len(one.start):
        return np.zeros(len(times), dtype=np.bool_)
    index = np.searchsorted(one.start, times, side="right") - 1
    inside: npt.NDArray[np.bool_] = (index >= 0) & (times < one.end[np.maximum(index, 0)])
    return inside


def length_before(one: Intervals, times: Nanoseconds) -> Nanoseconds:
    """For each of `times`, the nanoseconds of the intervals before it."""
    if not len(one.start):
        return np.zeros(len(times), dtype=np.int64)
    cumulative = np.concatenate([[0], np.cumsum(one.end - one.start)])
    index = np.searchsorted(one.start, times, side="right")
    # The last interval that has started may end after the given time.
    excess = np.maximum(one.end[np.maximum(index - 1, 0)] - times, 0)
    length: Nanoseconds = cumulative[index] - np.where(index > 0, excess, 0)
    return length
