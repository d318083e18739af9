"""Why communication is exposed: every exposed nanosecond of a rank gets one cause.

In this order: the call waits for another rank; a gather starts late, although compute ran right
before it and no collective did; a gather is queued behind a reduce-scatter; the message is too
small for its latency; the rest is transfer that is longer than the compute it overlaps with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Bools, Ints
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import GATHER_FORWARD, SCATTER
from shardwise.observe.rules import Thresholds
from shardwise.step.intervals import length_before, union

# Nanoseconds: a gather that starts this soon after a reduce-scatter was queued behind it.
_RIGHT_AFTER = 50_000


class Stalls(NamedTuple):
    """Exposed nanoseconds of each call, by cause."""

    waiting_ns: Ints
    late_ns: Ints
    queued_ns: Ints
    small_message_ns: Ints
    transfer_ns: Ints

    @property
    def total_ns(self) -> int:
        """Exposed nanoseconds of all calls, which is the sum over causes."""
        return int(sum(part.sum() for part in self))


def stalls_of(rank: RankSummary, transfer: Ints | None, thresholds: Thresholds) -> Stalls:
    """Assign every exposed nanosecond of a rank's calls to a cause.

    `transfer` is the transfer nanoseconds of each call, -1 where unknown; None if collectives were
    not matched across ranks, and then no waiting is found.
    """
    calls, exposed = rank.calls, rank.exposed
    count = len(calls)
    left = exposed.per_call(count)
    waiting = np.zeros(count, dtype=np.int64)
    if transfer is not None:
        # A kernel waits first, then transfers.
        arrived = np.where(transfer >= 0, calls.end_ns - transfer, calls.start_ns)
        until = np.minimum(exposed.end_ns, arrived[exposed.call])
        spent = np.maximum(until - exposed.start_ns, 0).astype(np.float64)
        waiting = np.bincount(exposed.call, weights=spent, minlength=count).astype(np.int64)
        left = left - waiting
    gathers = np.asarray([op == "all-gather" for op in calls.operation], dtype=np.bool_)
    late = np.where(
        gathers & ~_first_of_step(rank, gathers), np.minimum(left, rank.overlappable_ns), 0
    )
    left = left - late
    queued = np.minimum(left, np.where(gathers, _queued_behind_scatters(rank), 0))
    left = left - queued
    small = np.minimum(left, _latency(rank, thresholds))
    return Stalls(waiting, late, queued, small, left - small)


def _first_of_step(rank: RankSummary, gathers: Bools) -> Bools:
    """Boolean per call: a gather that cannot start earlier, since the parameters just changed.

    The optimizer updates them right before the gathers of the first unit of a forward, and before
    the first gather of each step.
    """
    count = len(rank.calls)
    first = np.zeros(count, dtype=np.bool_)
    first_unit = rank.units[0].unit if rank.units else None
    for index, purpose in enumerate(rank.purposes):
        first[index] = purpose.unit == first_unit and purpose.role == GATHER_FORWARD
    for begin, end in rank.windows or [rank.span]:
        inside = gathers & (rank.calls.start_ns >= begin) & (rank.calls.start_ns < end)
        first[np.flatnonzero(inside)[:1]] = True
    return first


def _queued_behind_scatters(rank: RankSummary) -> Ints:
    """Nanoseconds for which each call was issued but waited for a running reduce-scatter.

    0 for a call that does not start right after a reduce-scatter.
    """
    calls = rank.calls
    scatters = np.asarray(
        [op == "reduce-scatter" or purpose.role == SCATTER
         for op, purpose in zip(calls.operation, rank.purposes, strict=True)], dtype=np.bool_
    )  # fmt: skip
    running = union(calls.start_ns[scatters], calls.end_ns[scatters])
    if not len(running.end):
        return np.zeros(len(calls), dtype=np.int64)
    last = np.searchsorted(running.end, calls.start_ns, side="right") - 1
    ended = np.where(last >= 0, running.end[np.maximum(last, 0)], -1)
    follows = (ended >= 0) & (calls.start_ns - ended <= _RIGHT_AFTER)
    follows &= (calls.issued_ns >= 0) & (calls.issued_ns < ended)
    queued = length_before(running, calls.start_ns) - length_before(running, calls.issued_ns)
    return np.where(follows, queued, 0)


def _latency(rank: RankSummary, thresholds: Thresholds) -> Ints:
    """Nanoseconds that each small message takes beyond its share of a large message.

    The rate is that of large messages of the same operation; without any, merging messages up to
    the limit would pay the latency once. 0 for large messages.
    """
    calls, limit = rank.calls, thresholds.small_message
    latency = np.zeros(len(calls), dtype=np.int64)
    operations = np.asarray(calls.operation)
    known = calls.moved_bytes > 0
    rates = np.where(known, calls.moved_bytes / np.maximum(calls.duration_ns, 1), 0.0)
    for operation in set(calls.operation):
        mine = known & (operations == operation)
        small = mine & (calls.moved_bytes < limit)
        large = mine & ~small
        if large.any():
            needed = calls.moved_bytes[small] / rates[large].max()
        else:
            needed = calls.duration_ns[small] * (calls.moved_bytes[small] / limit)
        latency[small] = np.maximum(calls.duration_ns[small] - needed, 0).astype(np.int64)
    return latency
