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

from shardwise.observe.file.trace import Ints, Trace
from shardwise.observe.rank.calls import Calls, launch_rows
from shardwise.observe.rank.classify import on_device
from shardwise.timeline.intervals import Intervals, shared, union
from shardwise.timeline.spans import KINDS, Kind, Timeline

ROOT = "root"
GATHER_FORWARD, GATHER_BACKWARD, SCATTER = "gather forward", "gather backward", "scatter"
_COPYING = ("all_gather", "all_gather_copy_out", "post_backward_reduce")
_ANNOTATION = re.compile(r"FSDP::(?P<what>\w+)(?: \((?P<unit>.*)\)| for (?P<target>.*))?$")


class Note(NamedTuple):
    """One annotation: what FSDP2 did for which unit."""

    what: str
    unit: str
    thread: int
    start_ns: int
    end_ns: int


class Place(NamedTuple):
    """The unit a collective serves, and as what."""

    unit: str
    role: str


NOWHERE = Place("", "")


class UnitTime(NamedTuple):
    """Nanoseconds of one unit over the whole trace; `exposed` has no compute beside it."""

    unit: str
    gathers: int
    scatters: int
    forward_ns: int
    backward_ns: int
    # Packing and unpacking; on a device part of compute.
    copy_ns: int
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


def unit_times(
    trace: Trace, timeline: Timeline, calls: Calls, places: list[Place]
) -> list[UnitTime]:
    """A row per unit in the order of the forward; empty where FSDP2 left no annotations."""
    notes = notes_of(trace)
    compute = timeline.covered("compute")
    found: dict[Place, list[int]] = {}
    for index, place in enumerate(places):
        found.setdefault(place, []).append(index)
    names = list(dict.fromkeys(note.unit for note in notes if note.what == "pre_forward"))

    def spent(unit: str, role: str) -> tuple[int, int, int]:
        mine = found.get(Place(unit, role), [])
        covered = union(calls.start_ns[mine], calls.end_ns[mine])
        exposed = covered.length - shared(covered, compute)
        return len(mine), int(calls.lasted_ns[mine].sum()), exposed

    work = _Work(trace, timeline, notes, compute)
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
                forward_ns=work.computed(unit, "forward"),
                backward_ns=work.computed(unit, "backward"),
                copy_ns=work.copied(unit),
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


def places_of(trace: Trace, calls: Calls) -> list[Place]:
    """The unit each call was launched for, and as what."""
    nesting = _Nesting(notes_of(trace))
    # Equal places are one object: there are as many as calls, on each of a thousand ranks.
    known: dict[Place, Place] = {}
    return [
        known.setdefault(place := _place(nesting, thread, asked), place)
        for thread, asked in zip(calls.asked_thread.tolist(), calls.asked_ns.tolist(), strict=True)
    ]


def _place(nesting: _Nesting, thread: int, asked_ns: int) -> Place:
    around = nesting.around(thread, asked_ns)
    for note in around:
        if note.what == "post_backward_reduce":
            return Place(note.unit, SCATTER)
        if note.what == "all_gather":
            backward = any(n.what in ("pre_backward", "backward_prefetch") for n in around)
            return Place(note.unit, GATHER_BACKWARD if backward else GATHER_FORWARD)
    return NOWHERE


class _Work:
    """Compute and copies of units: on a device what was launched in their notes, on a CPU what ran.

    The root is open around all others, so that its own compute cannot be told from theirs.
    """

    def __init__(
        self, trace: Trace, timeline: Timeline, notes: list[Note], compute: Intervals
    ) -> None:
        self._timeline = timeline
        self._notes: dict[str, list[Note]] = {}
        for note in notes:
            self._notes.setdefault(note.unit, []).append(note)
        rows = np.flatnonzero(on_device(trace))
        # On a device: when each row was launched, and rows in that order. There may be hundreds of
        # units, so that none may look at all rows.
        self._launched: Ints | None = None
        if len(rows):
            launch = launch_rows(trace, rows)
            launched = np.where(launch >= 0, trace.start_ns[launch], -1)
            self._order = np.argsort(launched, kind="stable")
            self._launched = launched[self._order]
        self._covered = {"compute": compute, "copy": timeline.covered("copy")}

    def computed(self, unit: str, phase: str) -> int:
        """Nanoseconds between the notes that open and close a unit's phase."""
        if unit == ROOT:
            return 0
        closing = "post_forward" if phase == "forward" else "post_backward_accumulate"
        windows = []
        opened: Note | None = None
        for note in self._notes[unit]:
            if note.what == f"pre_{phase}":
                opened = note
            elif note.what == closing and opened is not None:
                windows.append((opened.end_ns, note.start_ns))
                opened = None
        return self._spent(windows, ("compute",))

    def copied(self, unit: str) -> int:
        """Nanoseconds of packing and unpacking around a unit's collectives."""
        windows = [(n.start_ns, n.end_ns) for n in self._notes[unit] if n.what in _COPYING]
        # A device packs with kernels; a CPU's operations of this kind are known by their names.
        kinds: tuple[Kind, ...] = ("copy",) if self._launched is None else ("copy", "compute")
        return self._spent(windows, kinds)

    def _spent(self, windows: list[tuple[int, int]], kinds: tuple[Kind, ...]) -> int:
        inside = union(*(np.asarray([w[i] for w in windows], dtype=np.int64) for i in (0, 1)))
        if self._launched is None:
            (kind,) = kinds
            return shared(inside, self._covered[kind])
        edges = np.searchsorted(self._launched, np.stack([inside.start, inside.end]))
        there = [self._order[a:b] for a, b in edges.T.tolist()]
        mine = np.concatenate([np.empty(0, dtype=np.int64), *there])
        mine = mine[np.isin(self._timeline.kind[mine], [KINDS.index(kind) for kind in kinds])]
        return union(self._timeline.start_ns[mine], self._timeline.end_ns[mine]).length
