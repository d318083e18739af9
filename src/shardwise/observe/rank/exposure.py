"""When collectives ran with nothing computing beside them, and what room they had before."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import Calls
from shardwise.timeline.intervals import Intervals, length_until


class Exposed(NamedTuple):
    """Instants in which a collective runs and nothing computes, each of one call.

    Where several run together, the instant belongs to the one that began last.
    """

    call: Ints
    start_ns: Ints
    end_ns: Ints

    def per_call(self, count: int) -> Ints:
        lengths = (self.end_ns - self.start_ns).astype(np.float64)
        return np.bincount(self.call, weights=lengths, minlength=count).astype(np.int64)


def exposed_pieces(calls: Calls, compute: Intervals, span: tuple[int, int]) -> Exposed:
    """Where collectives run and nothing computes, inside `span`."""
    owner, start, end = _owned(calls)
    start, end = np.clip(start, *span), np.clip(end, *span)
    # Cut the pieces where compute begins or ends, and keep what lies outside it.
    edges = np.concatenate([compute.start, compute.end])
    edges.sort()
    first = np.searchsorted(edges, start, side="right")
    cuts = np.searchsorted(edges, end, side="left") - first
    cuts = np.where(end > start, cuts + 1, 0)
    index = np.repeat(np.arange(len(owner)), cuts)
    number = np.arange(len(index)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    place = first[index] + number
    last = number == cuts[index] - 1
    begin = np.where(number == 0, start[index], edges[place - 1] if len(edges) else 0)
    stop = np.where(last, end[index], edges[np.minimum(place, max(0, len(edges) - 1))]
                    if len(edges) else 0)  # fmt: skip
    # An even number of edges passed: between two intervals.
    kept = (place % 2 == 0) & (stop > begin)
    return Exposed(owner[index[kept]], begin[kept], stop[kept])


def _owned(calls: Calls) -> tuple[Ints, Ints, Ints]:
    """Instants in which some collective runs, each given to the one that began last."""
    owner: list[int] = []
    begin: list[int] = []
    stop: list[int] = []
    running: list[tuple[int, int]] = []  # the last to begin first
    starts, ends = calls.start_ns.tolist(), calls.end_ns.tolist()
    now = 0

    def advance(limit: int) -> None:
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


def free_before(calls: Calls, compute: Intervals) -> Ints:
    """Compute that ran right before each call while no collective did: room it could have used."""
    if not len(calls):
        return np.empty(0, dtype=np.int64)
    reached = np.maximum.accumulate(calls.end_ns)
    # Not those that begin at the same moment: they did not stand in the way before.
    earlier = np.searchsorted(calls.start_ns, calls.start_ns, side="left") - 1
    before = np.where(earlier >= 0, reached[np.maximum(earlier, 0)], calls.start_ns)
    before = np.minimum(before, calls.start_ns)
    room: Ints = length_until(compute, calls.start_ns) - length_until(compute, before)
    return room
