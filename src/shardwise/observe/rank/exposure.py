"""Exposed communication by call, and compute before a call that could have hidden it."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import Calls
from shardwise.step.intervals import Intervals, length_before


class Exposed(NamedTuple):
    """Periods in which a collective runs and nothing computes, each assigned to one call.

    `call` is the index of the call. Where several collectives run at once, the period belongs to
    the one that started last.
    """

    call: Ints
    start_ns: Ints
    end_ns: Ints

    def per_call(self, count: int) -> Ints:
        """Exposed nanoseconds of each of `count` calls."""
        lengths = (self.end_ns - self.start_ns).astype(np.float64)
        return np.bincount(self.call, weights=lengths, minlength=count).astype(np.int64)


def exposed_pieces(calls: Calls, compute: Intervals, span: tuple[int, int]) -> Exposed:
    """Periods inside `span` in which a collective runs and nothing computes."""
    owner, start, end = _disjoint_periods(calls)
    start, end = np.clip(start, *span), np.clip(end, *span)
    # Split the periods where compute starts or ends, and keep the parts without compute.
    edges = np.concatenate([compute.start, compute.end])
    edges.sort()
    first = np.searchsorted(edges, start, side="right")
    cuts = np.searchsorted(edges, end, side="left") - first
    cuts = np.where(end > start, cuts + 1, 0)
    index = np.repeat(np.arange(len(owner)), cuts)
    number = np.arange(len(index)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    edge = first[index] + number
    last = number == cuts[index] - 1
    begin = np.where(number == 0, start[index], edges[edge - 1] if len(edges) else 0)
    stop = np.where(last, end[index], edges[np.minimum(edge, max(0, len(edges) - 1))]
                    if len(edges) else 0)  # fmt: skip
    # After an even number of edges, no compute interval is open.
    kept = (edge % 2 == 0) & (stop > begin)
    return Exposed(owner[index[kept]], begin[kept], stop[kept])


def _disjoint_periods(calls: Calls) -> tuple[Ints, Ints, Ints]:
    """Disjoint periods in which a collective runs: index of its call, start and end.

    Where several collectives run at once, the period belongs to the one that started last.
    """
    owner: list[int] = []
    begin: list[int] = []
    stop: list[int] = []
    running: list[tuple[int, int]] = []  # heap: the latest start on top
    starts, ends = calls.start_ns.tolist(), calls.end_ns.tolist()
    now = 0

    def advance(limit: int) -> None:
        """Record the periods from `now` to `limit`."""
        nonlocal now
        while running and now < limit:
            index = -running[0][1]
            until = min(ends[index], limit)
            if until > now:
                owner.append(index)
                begin.append(now)
                stop.append(until)
                now = until
            if ends[index] <= now:
                heapq.heappop(running)
        now = max(now, limit)

    for index, start in enumerate(starts):
        if running:
            advance(start)
        now = start
        heapq.heappush(running, (-start, -index))
    if starts:
        advance(max(ends))
    return tuple(np.asarray(column, dtype=np.int64) for column in (owner, begin, stop))  # type: ignore[return-value]


def overlappable_before(calls: Calls, compute: Intervals) -> Ints:
    """Nanoseconds of compute right before each call that could have hidden the call.

    No other collective ran during this compute.
    """
    if not len(calls):
        return np.empty(0, dtype=np.int64)
    last_end = np.maximum.accumulate(calls.end_ns)
    # Calls that start at the same moment did not block it before.
    earlier = np.searchsorted(calls.start_ns, calls.start_ns, side="left") - 1
    before = np.where(earlier >= 0, last_end[np.maximum(earlier, 0)], calls.start_ns)
    before = np.minimum(before, calls.start_ns)
    hidden: Ints = length_before(compute, calls.start_ns) - length_before(compute, before)
    return hidden
