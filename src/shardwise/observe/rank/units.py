"""Time by FSDP unit, from the annotations that FSDP2 writes into a trace.

A collective belongs to the unit whose annotation encloses its launch: on a GPU the launch with the
kernel's correlation id, on a CPU the torch.distributed operation that issued it. A unit computes
between the end of its `pre_` annotation and the start of its `post_` annotation; what nested units
do in between is theirs, so that no time counts twice.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Literal, NamedTuple

import numpy as np

from shardwise.observe.file.trace import Bools, Ints, Trace
from shardwise.observe.rank.calls import Calls, launch_rows
from shardwise.observe.rank.classify import on_device
from shardwise.observe.rank.flatten_nested import flatten_nested
from shardwise.spec.mesh import INNER_AXES
from shardwise.step.intervals import Intervals, overlap_length, union
from shardwise.step.spans import Kind, Timeline

ROOT = "root"
GATHER_FORWARD, GATHER_BACKWARD, SCATTER = "gather forward", "gather backward", "scatter"
_COPY_ANNOTATIONS = ("all_gather", "all_gather_copy_out", "post_backward_reduce")
_CLOSED_BY = {"pre_forward": "post_forward", "pre_backward": "post_backward_accumulate"}
_ANNOTATION = re.compile(r"FSDP::(?P<what>\w+)(?: \((?P<unit>.*)\)| for (?P<target>.*))?$")

Work = Literal["forward", "backward", "copy"]
_CPU_KINDS: tuple[Kind, ...] = ("compute", "copy")


class Annotation(NamedTuple):
    """One FSDP2 annotation: the action (such as `pre_forward`), its unit, thread and time."""

    what: str
    unit: str
    thread: int
    start_ns: int
    end_ns: int


class Purpose(NamedTuple):
    """The unit a collective serves, and its role there."""

    unit: str
    role: str


NO_PURPOSE = Purpose("", "")


class UnitTime(NamedTuple):
    """Nanoseconds of one FSDP unit, summed over the profiled steps.

    Exposed time has no compute at the same time. `gathers` and `scatters` are numbers of calls.
    """

    unit: str
    gathers: int
    scatters: int
    forward_ns: int
    backward_ns: int
    # Packing and unpacking around collectives; on a GPU these are compute kernels.
    copy_ns: int
    gather_forward_ns: int
    gather_forward_exposed_ns: int
    gather_backward_ns: int
    gather_backward_exposed_ns: int
    scatter_ns: int
    scatter_exposed_ns: int


def annotations_of(trace: Trace) -> list[Annotation]:
    """FSDP2's annotations, ordered by start."""
    parsed = {}
    for code, text in enumerate(trace.texts):
        match = _ANNOTATION.match(text)
        if match:
            parsed[code] = (match["what"], match["unit"] or match["target"] or ROOT)
    if not parsed:
        return []
    rows = np.flatnonzero(np.isin(trace.name, list(parsed)) & trace.in_category("user_annotation"))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    return [
        Annotation(*parsed[int(trace.name[row])], int(trace.thread[row]), int(trace.start_ns[row]),
                   int(trace.end_ns[row]))
        for row in rows.tolist()
    ]  # fmt: skip


def unit_times(
    trace: Trace,
    timeline: Timeline,
    calls: Calls,
    purposes: list[Purpose],
    exposed_ns: Ints,
    span: tuple[int, int],
) -> list[UnitTime]:
    """Time per unit inside `span`, in forward order; empty without FSDP2 annotations.

    `exposed_ns` has a value per call. Every exposed instant belongs to one call, so that units sum
    to the exposed communication of the rank.
    """
    annotations = annotations_of(trace)
    profiled, durations = calls.inside(span)
    calls_of: dict[Purpose, list[int]] = {}
    for index in np.flatnonzero(profiled).tolist():
        calls_of.setdefault(purposes[index], []).append(index)
    names = list(dict.fromkeys(note.unit for note in annotations if note.what == "pre_forward"))
    work = _work_of_units(trace, timeline, annotations, span)

    def spent(unit: str, role: str) -> tuple[int, int, int]:
        """Calls, nanoseconds and exposed nanoseconds of the collectives of a unit in one role."""
        mine = calls_of.get(Purpose(unit, role), [])
        return len(mine), int(durations[mine].sum()), int(exposed_ns[mine].sum())

    times = []
    for unit in names:
        forward_calls, forward, forward_exposed = spent(unit, GATHER_FORWARD)
        backward_calls, backward, backward_exposed = spent(unit, GATHER_BACKWARD)
        scatters, scatter, scatter_exposed = spent(unit, SCATTER)
        times.append(
            UnitTime(
                unit=unit,
                gathers=forward_calls + backward_calls,
                scatters=scatters,
                forward_ns=work.get((unit, "forward"), 0),
                backward_ns=work.get((unit, "backward"), 0),
                copy_ns=work.get((unit, "copy"), 0),
                gather_forward_ns=forward,
                gather_forward_exposed_ns=forward_exposed,
                gather_backward_ns=backward,
                gather_backward_exposed_ns=backward_exposed,
                scatter_ns=scatter,
                scatter_exposed_ns=scatter_exposed,
            )
        )
    return times


class _Nesting:
    """Annotations of each thread with the index of their parent, to look up a moment quickly."""

    def __init__(self, annotations: list[Annotation]) -> None:
        self._threads: dict[int, tuple[list[int], list[Annotation], list[int]]] = {}
        for note in annotations:
            starts, mine, parents = self._threads.setdefault(note.thread, ([], [], []))
            parent = len(mine) - 1
            while parent >= 0 and mine[parent].end_ns <= note.start_ns:
                parent = parents[parent]
            starts.append(note.start_ns)
            mine.append(note)
            parents.append(parent)

    def enclosing(self, thread: int, time_ns: int) -> list[Annotation]:
        """Annotations open on a thread at a time, the innermost first."""
        starts, annotations, parents = self._threads.get(thread, ([], [], []))
        index = bisect_right(starts, time_ns) - 1
        enclosing = []
        while index >= 0:
            if annotations[index].end_ns >= time_ns:
                enclosing.append(annotations[index])
            index = parents[index]
        return enclosing


def purposes_of(trace: Trace, calls: Calls) -> list[Purpose]:
    """The unit that each call was issued for, and its role there; NO_PURPOSE where unknown."""
    nesting = _Nesting(annotations_of(trace))
    # Equal purposes share one object: there is one per call, on each of up to a thousand ranks.
    known: dict[Purpose, Purpose] = {}
    return [
        # Tensor parallelism all-reduces gradients of norms inside FSDP's annotations.
        NO_PURPOSE
        if operation.startswith(INNER_AXES)
        else known.setdefault(purpose := _purpose(nesting, thread, issued), purpose)
        for operation, thread, issued in zip(
            calls.operation, calls.issued_thread.tolist(), calls.issued_ns.tolist(), strict=True
        )
    ]


def _purpose(nesting: _Nesting, thread: int, issued_ns: int) -> Purpose:
    """Unit and role of a call that a thread issued at this time, by the annotations around it."""
    enclosing = nesting.enclosing(thread, issued_ns)
    for note in enclosing:
        if note.what == "post_backward_reduce":
            return Purpose(note.unit, SCATTER)
        if note.what == "all_gather":
            backward = any(n.what in ("pre_backward", "backward_prefetch") for n in enclosing)
            return Purpose(note.unit, GATHER_BACKWARD if backward else GATHER_FORWARD)
    return NO_PURPOSE


class _Window(NamedTuple):
    """A period of the host; `work` is None for FSDP2's own bookkeeping."""

    start_ns: int
    end_ns: int
    unit: str
    work: Work | None


def _work_of_units(
    trace: Trace, timeline: Timeline, annotations: list[Annotation], span: tuple[int, int]
) -> dict[tuple[str, Work], int]:
    """Nanoseconds of forward, backward and copies of each unit, inside `span`.

    On a GPU of the kernels that were launched in a unit's periods, on a CPU of what ran in them.
    """
    periods = _periods(annotations)
    if not periods:
        return {}
    rows = np.flatnonzero(on_device(trace))
    if not len(rows):
        covered = {kind: _clipped(timeline.covered(kind), span) for kind in _CPU_KINDS}
        return {
            (unit, work): overlap_length(period, covered["copy" if work == "copy" else "compute"])
            for (unit, work), period in periods.items()
        }
    start, end = np.clip(timeline.start_ns, *span), np.clip(timeline.end_ns, *span)
    launch = launch_rows(trace, rows)
    launched = np.where(launch >= 0, trace.start_ns[launch], -1)
    # Sorted once: with hundreds of units, scanning all rows for each would take too long.
    order = np.argsort(launched, kind="stable")
    launched = launched[order]
    compute: Bools = timeline.of_kind("compute")
    # A GPU packs and unpacks with compute kernels.
    either: Bools = compute | timeline.of_kind("copy")
    times = {}
    for (unit, work), period in periods.items():
        edges = np.searchsorted(launched, np.stack([period.start, period.end]))
        mine = np.concatenate([order[first:last] for first, last in edges.T.tolist()])
        mine = mine[(either if work == "copy" else compute)[mine]]
        times[unit, work] = union(start[mine], end[mine]).length
    return times


def _clipped(one: Intervals, span: tuple[int, int]) -> Intervals:
    """Intervals clipped to `span`; an interval outside becomes empty."""
    return Intervals(np.clip(one.start, *span), np.clip(one.end, *span))


def _periods(annotations: list[Annotation]) -> dict[tuple[str, Work], Intervals]:
    """Periods of the host by unit and work; a nested period is cut out of the one around it."""
    windows = []
    opened: dict[tuple[str, str], Annotation] = {}
    for note in annotations:
        work: Work | None = "copy" if note.what in _COPY_ANNOTATIONS else None
        windows.append(_Window(note.start_ns, note.end_ns, note.unit, work))
        if note.what in _CLOSED_BY:
            opened[note.unit, _CLOSED_BY[note.what]] = note
        before = opened.pop((note.unit, note.what), None)
        if before is not None:
            phase: Work = "forward" if before.what == "pre_forward" else "backward"
            windows.append(_Window(before.end_ns, note.start_ns, note.unit, phase))
    if not windows:
        return {}
    start = np.asarray([window.start_ns for window in windows], dtype=np.int64)
    end = np.asarray([window.end_ns for window in windows], dtype=np.int64)
    one_thread = np.zeros(len(windows), dtype=np.int32)
    no_kind = np.full(len(windows), -1, dtype=np.int8)
    pieces = flatten_nested(start, end, one_thread, one_thread, no_kind)
    rows: dict[tuple[str, Work], list[int]] = {}
    for row, owner in enumerate(pieces.owner.tolist()):
        window = windows[owner]
        if window.work is not None:
            rows.setdefault((window.unit, window.work), []).append(row)
    return {key: union(pieces.start[mine], pieces.end[mine]) for key, mine in rows.items()}
