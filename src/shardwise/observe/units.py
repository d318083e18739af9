"""Time by FSDP unit, from the annotations FSDP2 leaves in a trace.

A collective belongs to the unit whose annotation encloses its launch: on a GPU the launch that has
the kernel's correlation, on a CPU the operation of torch.distributed in the same place of the
order. A unit computes between the end of its `pre_` and the beginning of its `post_` annotations.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from shardwise.observe.classify import RUNTIME_CATEGORIES, on_device
from shardwise.observe.gloo import gloo_calls
from shardwise.observe.trace import Trace
from shardwise.timeline.intervals import Intervals, minus, overlap, union
from shardwise.timeline.spans import Timeline

ROOT = "root"
_ANNOTATION = re.compile(r"FSDP::(?P<what>\w+)(?: \((?P<unit>.*)\)| for (?P<target>.*))?$")


class Note(NamedTuple):
    """One annotation: what FSDP2 did for which unit."""

    what: str
    unit: str
    thread: int
    start_ns: int
    end_ns: int


class UnitTime(NamedTuple):
    """Nanoseconds of one unit over the whole trace; `exposed` has no compute beside it."""

    unit: str
    gathers: int
    scatters: int
    forward_ns: int
    backward_ns: int
    gather_forward_ns: int
    gather_forward_exposed_ns: int
    gather_backward_ns: int
    gather_backward_exposed_ns: int
    scatter_ns: int
    scatter_exposed_ns: int


def notes_of(trace: Trace) -> list[Note]:
    """FSDP2's annotations in the order they began."""
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
        Note(*parsed[int(trace.name[row])], int(trace.thread[row]), int(trace.start_ns[row]),
             int(trace.end_ns[row]))
        for row in rows.tolist()
    ]  # fmt: skip


class _Launch(NamedTuple):
    """A collective, and where the host asked for it."""

    start_ns: int
    end_ns: int
    asked_ns: int
    thread: int


def unit_times(trace: Trace, timeline: Timeline) -> list[UnitTime]:
    """A row per unit in the order of the forward; empty where FSDP2 left no annotations."""
    notes = notes_of(trace)
    if not notes:
        return []
    compute = timeline.covered("compute")
    found: dict[tuple[str, str], list[_Launch]] = {}
    nesting = _Nesting(notes)
    for launch in _launches(trace, timeline):
        place = _place(nesting, launch)
        if place is not None:
            found.setdefault(place, []).append(launch)
    names = list(dict.fromkeys(note.unit for note in notes if note.what == "pre_forward"))

    def spent(unit: str, kind: str) -> tuple[int, int, int]:
        launches = found.get((unit, kind), [])
        start = np.asarray([x.start_ns for x in launches], dtype=np.int64)
        end = np.asarray([x.end_ns for x in launches], dtype=np.int64)
        covered = union(start, end)
        return len(launches), int((end - start).sum()), minus(covered, compute)

    times = []
    for unit in names:
        forward_calls, forward, forward_exposed = spent(unit, "gather forward")
        backward_calls, backward, backward_exposed = spent(unit, "gather backward")
        scatters, scatter, scatter_exposed = spent(unit, "scatter")
        times.append(
            UnitTime(
                unit=unit,
                gathers=forward_calls + backward_calls,
                scatters=scatters,
                forward_ns=_computed(trace, timeline, notes, unit, "forward", compute),
                backward_ns=_computed(trace, timeline, notes, unit, "backward", compute),
                gather_forward_ns=forward,
                gather_forward_exposed_ns=forward_exposed,
                gather_backward_ns=backward,
                gather_backward_exposed_ns=backward_exposed,
                scatter_ns=scatter,
                scatter_exposed_ns=scatter_exposed,
            )
        )
    return times


def _launches(trace: Trace, timeline: Timeline) -> list[_Launch]:
    if on_device(trace).any():
        return _device_launches(trace, timeline)
    calls = gloo_calls(trace)
    if calls.asked is None:
        return []
    return [
        _Launch(int(trace.start_ns[r]), int(trace.end_ns[r]), int(trace.start_ns[s]),
                int(trace.thread[s]))
        for r, s in zip(calls.carried.tolist(), calls.asked.tolist(), strict=True)
    ]  # fmt: skip


def _device_launches(trace: Trace, timeline: Timeline) -> list[_Launch]:
    """Kernels that communicate, each with the runtime call of the same correlation."""
    runtime = trace.in_category(*RUNTIME_CATEGORIES)
    calls = {
        int(trace.correlation[row]): row
        for row in np.flatnonzero(runtime & (trace.correlation >= 0)).tolist()
    }
    rows = np.flatnonzero(on_device(trace))
    moving = timeline.of_kind("communication")
    found = []
    for row in rows[moving].tolist():
        call = calls.get(int(trace.correlation[row]))
        if call is not None:
            found.append(
                _Launch(int(trace.start_ns[row]), int(trace.end_ns[row]),
                        int(trace.start_ns[call]), int(trace.thread[call]))
            )  # fmt: skip
    return found


class _Nesting:
    """Annotations of each thread with the one around each, so that a moment finds all around it."""

    def __init__(self, notes: list[Note]) -> None:
        self._threads: dict[int, tuple[list[int], list[Note], list[int]]] = {}
        for note in notes:
            starts, mine, parents = self._threads.setdefault(note.thread, ([], [], []))
            parent = len(mine) - 1
            while parent >= 0 and mine[parent].end_ns <= note.start_ns:
                parent = parents[parent]
            starts.append(note.start_ns)
            mine.append(note)
            parents.append(parent)

    def around(self, thread: int, moment: int) -> list[Note]:
        """The innermost first."""
        starts, notes, parents = self._threads.get(thread, ([], [], []))
        index = bisect_right(starts, moment) - 1
        found = []
        while index >= 0:
            if notes[index].end_ns >= moment:
                found.append(notes[index])
            index = parents[index]
        return found


def _place(nesting: _Nesting, launch: _Launch) -> tuple[str, str] | None:
    """The unit a collective was launched for, and as what."""
    around = nesting.around(launch.thread, launch.asked_ns)
    for note in around:
        if note.what == "post_backward_reduce":
            return note.unit, "scatter"
        if note.what == "all_gather":
            backward = any(n.what in ("pre_backward", "backward_prefetch") for n in around)
            return note.unit, "gather backward" if backward else "gather forward"
    return None


def _computed(
    trace: Trace,
    timeline: Timeline,
    notes: list[Note],
    unit: str,
    phase: str,
    compute: Intervals,
) -> int:
    """Compute between the notes that open and close a unit's phase.

    On a device what was launched in between; on a CPU what ran in between. The root is open around
    all others, so that its own share cannot be told from theirs.
    """
    if unit == ROOT:
        return 0
    closing = "post_forward" if phase == "forward" else "post_backward_accumulate"
    windows = []
    opened: Note | None = None
    for note in notes:
        if note.unit == unit and note.what == f"pre_{phase}":
            opened = note
        elif note.unit == unit and note.what == closing and opened is not None:
            windows.append((opened.end_ns, note.start_ns))
            opened = None
    start = np.asarray([begin for begin, _ in windows], dtype=np.int64)
    end = np.asarray([stop for _, stop in windows], dtype=np.int64)
    if not on_device(trace).any():
        return overlap(union(start, end), compute)
    runtime = np.flatnonzero(trace.in_category(*RUNTIME_CATEGORIES))
    asked = trace.start_ns[runtime]
    inside = np.zeros(len(runtime), dtype=np.bool_)
    for begin, stop in windows:
        inside |= (asked >= begin) & (asked < stop)
    launched = trace.correlation[runtime[inside]]
    rows = np.flatnonzero(on_device(trace))
    mine = timeline.of_kind("compute") & np.isin(trace.correlation[rows], launched[launched >= 0])
    return union(timeline.start_ns[mine], timeline.end_ns[mine]).length
