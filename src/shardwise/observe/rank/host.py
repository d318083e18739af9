"""Idle time of the device by reason: what the host did at that time.

Every idle instant gets the first reason that applies: data loading, the allocator requesting memory
from the driver, FSDP's rate limiter, a synchronisation of the host with the device, or a next
kernel that was not launched yet. The rest is unexplained.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints, Trace
from shardwise.observe.rank.calls import launch_rows
from shardwise.observe.rank.classify import RUNTIME_CATEGORIES, names_matching, on_device
from shardwise.step.intervals import Intervals, difference, intersection, length_before, union
from shardwise.step.spans import Timeline

_DATA = re.compile(r"^(enumerate\(DataLoader\)|shardwise::data)")
_RATE_LIMITER = re.compile(r"rate_limiter", re.IGNORECASE)
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|FreeHost)$|^cuMem(Create|Map)"
)
_SYNCHRONISE = re.compile(
    r"^(cuda|hip)((Device|Stream|Event)Synchronize|Memcpy)$|^cu(Ctx|Stream|Event)Synchronize$"
)
# Operations that make the host wait for a value from the device.
_VALUE_READS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
# Nanoseconds: a synchronisation that ended longer than this before the device became idle is not
# the cause.
_JUST_BEFORE_NS = 5_000


class Idle(NamedTuple):
    """Idle nanoseconds of a device (or of all threads of a CPU process) by reason."""

    data_ns: int = 0
    allocator_ns: int = 0
    rate_limiter_ns: int = 0
    synchronisation_ns: int = 0
    launch_ns: int = 0
    unexplained_ns: int = 0

    @property
    def total_ns(self) -> int:
        """Idle nanoseconds of all reasons."""
        return sum(self)


class HostActivity(NamedTuple):
    """Activity of the host inside the profiled steps."""

    idle: Idle
    # Nanoseconds of loading data, whether the device was idle or not: in total, and in each step.
    data_ns: int
    data_by_step: list[int]
    allocator_calls: int
    synchronisations: int
    # The operation that caused most synchronisations; empty where unknown.
    synchronised_by: str


def host_activity(
    trace: Trace, timeline: Timeline, span: tuple[int, int], windows: list[tuple[int, int]]
) -> HostActivity:
    """Idle nanoseconds inside `span` by reason, and the activity of the host.

    `windows` are the profiled steps.
    """
    begin, end = span
    full_span = Intervals(*(np.asarray([edge], dtype=np.int64) for edge in span))
    busy = union(np.clip(timeline.start_ns, begin, end), np.clip(timeline.end_ns, begin, end))
    idle = difference(full_span, busy)
    runtime = trace.in_category(*RUNTIME_CATEGORIES)
    inside = (trace.end_ns >= begin) & (trace.start_ns < end)
    data = inside & names_matching(trace, trace.name, _DATA)
    allocating = inside & runtime & names_matching(trace, trace.name, _ALLOCATOR)
    limited = inside & names_matching(trace, trace.name, _RATE_LIMITER)
    waiting = np.flatnonzero(inside & runtime & names_matching(trace, trace.name, _SYNCHRONISE))

    spent = []
    for rows in (data, allocating, limited):
        reason = intersection(idle, union(trace.start_ns[rows], trace.end_ns[rows]))
        idle = difference(idle, reason)
        spent.append(reason.length)
    synchronised = launching = 0
    if on_device(trace).any():
        after_sync, unlaunched = _gaps(trace, timeline, idle, trace.end_ns[waiting])
        synchronised, launching = after_sync.length, unlaunched.length
    else:
        # On a CPU nothing is launched: Python itself takes the idle time.
        launching = idle.length
    reasons = Idle(
        data_ns=spent[0],
        allocator_ns=spent[1],
        rate_limiter_ns=spent[2],
        synchronisation_ns=synchronised,
        launch_ns=launching,
        unexplained_ns=idle.length - synchronised - launching,
    )
    loading = intersection(full_span, union(trace.start_ns[data], trace.end_ns[data]))
    edges = np.asarray(windows, dtype=np.int64).reshape(-1, 2)
    return HostActivity(
        idle=reasons,
        data_ns=loading.length,
        data_by_step=np.diff(length_before(loading, edges.reshape(-1)))[::2].tolist(),
        allocator_calls=int(allocating.sum()),
        synchronisations=len(waiting),
        synchronised_by=_synchronising_operation(trace, waiting),
    )


def _gaps(
    trace: Trace, timeline: Timeline, idle: Intervals, waits: Ints
) -> tuple[Intervals, Intervals]:
    """Idle periods after a synchronisation of the host, and other periods before a late launch."""
    rows = np.flatnonzero(on_device(trace))
    order = np.argsort(trace.start_ns[rows], kind="stable")
    starts = timeline.start_ns[order]
    launch = launch_rows(trace, rows[order])
    following = np.searchsorted(starts, idle.end, side="left")
    known = following < len(starts)
    next_row = np.minimum(following, max(0, len(starts) - 1))
    launched = np.where(known & (launch[next_row] >= 0), trace.start_ns[launch[next_row]], -1)
    late = launched >= idle.start
    waits = np.sort(waits)
    # The last synchronisation that ended before the launch.
    index = np.searchsorted(waits, launched, side="right") - 1
    ended = np.where(index >= 0, waits[np.maximum(index, 0)] if len(waits) else -1, -1)
    after = late & (ended >= idle.start - _JUST_BEFORE_NS)
    return (
        Intervals(idle.start[after], idle.end[after]),
        Intervals(idle.start[late & ~after], idle.end[late & ~after]),
    )


def _synchronising_operation(trace: Trace, waits: Ints) -> str:
    """Operation in which most of these calls run: "aten::item" for all that read a value.

    Empty if most calls run in other operations.
    """
    codes = [trace.code(name) for name in _VALUE_READS]
    operations = np.flatnonzero(np.isin(trace.name, codes))
    if not len(operations) or not len(waits):
        return ""
    enclosed = 0
    for row in waits.tolist():
        same_thread = operations[trace.thread[operations] == trace.thread[row]]
        enclosed += bool(
            ((trace.start_ns[same_thread] <= trace.start_ns[row])
             & (trace.end_ns[same_thread] >= trace.end_ns[row])).any()
        )  # fmt: skip
    return "aten::item" if 2 * enclosed > len(waits) else ""
