"""Why communication was exposed: every exposed nanosecond of a rank gets one reason.

In this order: the call waited for another rank; a gather could have started earlier, since no
collective ran while something computed right before it; a gather stood behind a reduce-scatter; the
message was too small for its latency; and what is left is a link slower than the compute it hides
behind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Bools, Ints
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import GATHER_FORWARD, SCATTER
from shardwise.observe.rules import Thresholds
from shardwise.timeline.intervals import length_until, union

# A gather that begins this soon after a reduce-scatter was waiting for it.
_RIGHT_AFTER = 50_000


class Losses(NamedTuple):
    """Nanoseconds of each call."""

    waiting_ns: Ints
    late_ns: Ints
    serialised_ns: Ints
    small_ns: Ints
    slow_ns: Ints

    @property
    def total_ns(self) -> int:
        return int(sum(part.sum() for part in self))


def losses_of(rank: RankSummary, transfer: Ints | None, thresholds: Thresholds) -> Losses:
    """Give every exposed instant its reason. `transfer` is -1 where a call has no partner."""
    calls, exposed = rank.calls, rank.exposed
    count = len(calls)
    left = exposed.per_call(count)
    waiting = np.zeros(count, dtype=np.int64)
    if transfer is not None:
        # A kernel waits first and transfers then.
        arrived = np.where(transfer >= 0, calls.end_ns - transfer, calls.start_ns)
        until = np.minimum(exposed.end_ns, arrived[exposed.call])
        spent = np.maximum(until - exposed.start_ns, 0).astype(np.float64)
        waiting = np.bincount(exposed.call, weights=spent, minlength=count).astype(np.int64)
        left = left - waiting
    gathers = np.asarray([op == "all-gather" for op in calls.operation], dtype=np.bool_)
    late = np.where(gathers & ~_first_of_a_step(rank, gathers), np.minimum(left, rank.free_ns), 0)
    left = left - late
    serialised = np.minimum(left, np.where(gathers, _behind_scatters(rank), 0))
    left = left - serialised
    small = np.minimum(left, _latency(rank, thresholds))
    return Losses(waiting, late, serialised, small, left - small)


def _first_of_a_step(rank: RankSummary, gathers: Bools) -> Bools:
    """Gathers that nothing could bring forward: the optimizer has only just changed what they move.

    Those of the unit that opens a forward, and the first of each step.
    """
    count = len(rank.calls)
    found = np.zeros(count, dtype=np.bool_)
    opening = rank.units[0].unit if rank.units else None
    for index, place in enumerate(rank.places):
        found[index] = place.unit == opening and place.role == GATHER_FORWARD
    for begin, end in rank.windows or [rank.span]:
        inside = gathers & (rank.calls.start_ns >= begin) & (rank.calls.start_ns < end)
        found[np.flatnonzero(inside)[:1]] = True
    return found


def _behind_scatters(rank: RankSummary) -> Ints:
    """How long each call was asked for while a reduce-scatter ran that it then followed."""
    calls = rank.calls
    scatters = np.asarray(
        [op == "reduce-scatter" or place.role == SCATTER
         for op, place in zip(calls.operation, rank.places, strict=True)], dtype=np.bool_
    )  # fmt: skip
    running = union(calls.start_ns[scatters], calls.end_ns[scatters])
    if not len(running.end):
        return np.zeros(len(calls), dtype=np.int64)
    last = np.searchsorted(running.end, calls.start_ns, side="right") - 1
    ended = np.where(last >= 0, running.end[np.maximum(last, 0)], -1)
    follows = (ended >= 0) & (calls.start_ns - ended <= _RIGHT_AFTER)
    follows &= (calls.asked_ns >= 0) & (calls.asked_ns < ended)
    queued = length_until(running, calls.start_ns) - length_until(running, calls.asked_ns)
    return np.where(follows, queued, 0)


def _latency(rank: RankSummary, thresholds: Thresholds) -> Ints:
    """What small messages take beyond what they would as parts of large ones.

    Large ones of the same operation tell the rate; where there are none, merging up to the size
    that is not small would pay the latency once.
    """
    calls, enough = rank.calls, thresholds.small_message
    found = np.zeros(len(calls), dtype=np.int64)
    operations = np.asarray(calls.operation)
    known = calls.moved_bytes > 0
    rates = np.where(known, calls.moved_bytes / np.maximum(calls.lasted_ns, 1), 0.0)
    for operation in set(calls.operation):
        mine = known & (operations == operation)
        small = mine & (calls.moved_bytes < enough)
        large = mine & ~small
        if large.any():
            needed = calls.moved_bytes[small] / rates[large].max()
        else:
            needed = calls.lasted_ns[small] * (calls.moved_bytes[small] / enough)
        found[small] = np.maximum(calls.lasted_ns[small] - needed, 0).astype(np.int64)
    return found
