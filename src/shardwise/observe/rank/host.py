"""What the host did while the device had nothing to do.

Every idle instant gets the first of these reasons that holds: data was being loaded, the allocator
was asking the driver for memory, FSDP's rate limiter held the host, the host had just waited for
the device, or the next kernel was not launched yet. What is left is unexplained.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints, Trace
from shardwise.observe.rank.calls import launch_rows
from shardwise.observe.rank.classify import RUNTIME_CATEGORIES, named, on_device
from shardwise.timeline.intervals import Intervals, common, length_until, union, without
from shardwise.timeline.spans import Timeline

_DATA = re.compile(r"^(enumerate\(DataLoader\)|shardwise::data)")
_RATE_LIMITER = re.compile(r"rate_limiter", re.IGNORECASE)
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|FreeHost)$|^cuMem(Create|Map)"
)
_SYNCHRONISE = re.compile(
    r"^(cuda|hip)((Device|Stream|Event)Synchronize|Memcpy)$|^cu(Ctx|Stream|Event)Synchronize$"
)
# Operations that make the host wait for a number: the usual causes of a synchronisation.
_WAITING = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
# A call that ends this long before the device runs dry has let the host launch more work.
_JUST_BEFORE = 5_000


class Idle(NamedTuple):
    """Nanoseconds in which a device, or all threads of a process, did nothing; by reason."""

    data_ns: int = 0
    allocator_ns: int = 0
    rate_limiter_ns: int = 0
    synchronisation_ns: int = 0
    launch_ns: int = 0
    unexplained_ns: int = 0

    @property
    def total_ns(self) -> int:
        return sum(self)


class Host(NamedTuple):
    """What the host did inside the profiled steps."""

    idle: Idle
    # All time of loading data, idle or not, and the same by step.
    data_ns: int
    data_by_step: list[int]
    allocator_calls: int
    synchronisations: int
    # The operation around most synchronisations; empty where none is known.
    synchronised_by: str


def host_of(
    trace: Trace, timeline: Timeline, span: tuple[int, int], windows: list[tuple[int, int]]
) -> Host:
    """Explain the idle time of a trace inside `span`; `windows` are its steps."""
    begin, end = span
    whole = Intervals(*(np.asarray([edge], dtype=np.int64) for edge in span))
    busy = union(np.clip(timeline.start_ns, begin, end), np.clip(timeline.end_ns, begin, end))
    left = without(whole, busy)
    runtime = trace.in_category(*RUNTIME_CATEGORIES)
    inside = (trace.end_ns >= begin) & (trace.start_ns < end)
    data = inside & named(trace, trace.name, _DATA)
    allocating = inside & runtime & named(trace, trace.name, _ALLOCATOR)
    limited = inside & named(trace, trace.name, _RATE_LIMITER)
    waiting = np.flatnonzero(inside & runtime & named(trace, trace.name, _SYNCHRONISE))

    spent = []
    for rows in (data, allocating, limited):
        reason = common(left, union(trace.start_ns[rows], trace.end_ns[rows]))
        left = without(left, reason)
        spent.append(reason.length)
    synchronised = launching = 0
    if on_device(trace).any():
        after_sync, unlaunched = _gaps(trace, timeline, left, trace.end_ns[waiting])
        synchronised, launching = after_sync.length, unlaunched.length
    else:
        # Nothing is launched on a CPU: whatever is idle, Python keeps.
        launching = left.length
    idle = Idle(
        data_ns=spent[0],
        allocator_ns=spent[1],
        rate_limiter_ns=spent[2],
        synchronisation_ns=synchronised,
        launch_ns=launching,
        unexplained_ns=left.length - synchronised - launching,
    )
    loading = common(whole, union(trace.start_ns[data], trace.end_ns[data]))
    edges = np.asarray(windows, dtype=np.int64).reshape(-1, 2)
    return Host(
        idle=idle,
        data_ns=loading.length,
        data_by_step=np.diff(length_until(loading, edges.reshape(-1)))[::2].tolist(),
        allocator_calls=int(allocating.sum()),
        synchronisations=len(waiting),
        synchronised_by=_around(trace, waiting),
    )


def _gaps(
    trace: Trace, timeline: Timeline, idle: Intervals, waits: Ints
) -> tuple[Intervals, Intervals]:
    """Idle after the host had waited for the device, and idle before a launch that came late."""
    rows = np.flatnonzero(on_device(trace))
    order = np.argsort(trace.start_ns[rows], kind="stable")
    starts = timeline.start_ns[order]
    launch = launch_rows(trace, rows[order])
    following = np.searchsorted(starts, idle.end, side="left")
    known = following < len(starts)
    place = np.minimum(following, max(0, len(starts) - 1))
    asked = np.where(known & (launch[place] >= 0), trace.start_ns[launch[place]], -1)
    late = asked >= idle.start
    waits = np.sort(waits)
    # The last wait that ended before the launch.
    index = np.searchsorted(waits, asked, side="right") - 1
    ended = np.where(index >= 0, waits[np.maximum(index, 0)] if len(waits) else -1, -1)
    after = late & (ended >= idle.start - _JUST_BEFORE)
    return (
        Intervals(idle.start[after], idle.end[after]),
        Intervals(idle.start[late & ~after], idle.end[late & ~after]),
    )


def _around(trace: Trace, waits: Ints) -> str:
    """The operation in which most of these calls lie."""
    codes = [trace.code(name) for name in _WAITING]
    operations = np.flatnonzero(np.isin(trace.name, codes))
    if not len(operations) or not len(waits):
        return ""
    found = 0
    for row in waits.tolist():
        begun = operations[trace.thread[operations] == trace.thread[row]]
        found += bool(
            ((trace.start_ns[begun] <= trace.start_ns[row])
             & (trace.end_ns[begun] >= trace.end_ns[row])).any()
        )  # fmt: skip
    return "aten::item" if 2 * found > len(waits) else ""
