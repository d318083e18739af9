"""A simulated step beside the measured one: the same terms of both, and unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import ROOT, UnitTime
from shardwise.step import CollectiveProfile, relative_error
from shardwise.timeline.breakdown import breakdown
from shardwise.timeline.chrome import chrome_events
from shardwise.timeline.intervals import minus, union
from shardwise.timeline.spans import KINDS, Timeline


class Term(NamedTuple):
    """One quantity of a step, in nanoseconds, calls or bytes."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        return relative_error(self.predicted, self.measured)


class UnitTerms(NamedTuple):
    """One unit by its measured name."""

    unit: str
    terms: list[Term]


class Against(NamedTuple):
    """Both steps of one rank. `units` is empty where the two have different units."""

    terms: list[Term]
    units: list[UnitTerms]


# What a unit's row compares, by the fields of UnitTime.
UNIT_TERMS = {
    "forward": "forward_ns",
    "backward": "backward_ns",
    "gather fwd": "gather_forward_ns",
    "gather bwd": "gather_backward_ns",
    "scatter": "scatter_ns",
}


def against(predicted: Timeline, rank: RankSummary) -> Against:
    """Compare a simulated step with the average profiled one."""
    if not rank.on_cpu:
        # A device packs and unpacks with kernels, which a trace cannot tell from compute.
        computing, copying = KINDS.index("compute"), KINDS.index("copy")
        kinds = np.where(predicted.kind == copying, computing, predicted.kind)
        predicted = replace(predicted, kind=kinds.astype(np.int8))
    ours, theirs = breakdown(predicted), rank.inside
    steps = max(1, len(rank.steps))
    terms = [
        Term(name, getattr(ours, field), getattr(theirs, field) / steps)
        for name, field in (
            ("step", "window_ns"),
            ("compute", "compute_ns"),
            ("exposed communication", "exposed_communication_ns"),
            ("exposed copies", "exposed_copy_ns"),
            ("idle", "idle_ns"),
            ("communication, hidden or not", "communication_ns"),
        )
    ]
    return Against([t for t in terms if t.predicted or t.measured], _units(predicted, rank))


def _units(predicted: Timeline, rank: RankSummary) -> list[UnitTerms]:
    ours = [u for u in predicted_units(predicted) if u.unit != ROOT]
    theirs = [u for u in rank.units if u.unit != ROOT]
    if not ours or len(ours) != len(theirs):
        return []
    steps = max(1, len(rank.steps))
    return [
        UnitTerms(
            real.unit,
            [Term(name, getattr(guess, field), getattr(real, field) / steps)
             for name, field in UNIT_TERMS.items()],
        )
        for guess, real in zip(ours, theirs, strict=True)
    ]  # fmt: skip


def predicted_units(timeline: Timeline) -> list[UnitTime]:
    """Time by unit of a simulated step, in the order of the forward."""
    compute = timeline.covered("compute")
    names = np.asarray(timeline.names, dtype=object)[timeline.name]
    order = np.argsort(timeline.start_ns, kind="stable")
    units = list(dict.fromkeys(int(u) for u in timeline.unit[order] if u >= 0))
    found = []
    for unit in units:
        mine = timeline.unit == unit
        gathers = mine & (names == "all-gather")
        backward = gathers & _before_backward(timeline, mine, names)
        forward = gathers & ~backward
        scatters = mine & (names == "reduce-scatter")

        def spent(rows: Any) -> int:
            return int((timeline.end_ns[rows] - timeline.start_ns[rows]).sum())

        def alone(rows: Any) -> int:
            return minus(union(timeline.start_ns[rows], timeline.end_ns[rows]), compute)

        found.append(
            UnitTime(
                unit=timeline.units[unit],
                gathers=int(gathers.sum()),
                scatters=int(scatters.sum()),
                forward_ns=spent(mine & (names == "forward")),
                backward_ns=spent(mine & (names == "backward")),
                copy_ns=spent(mine & ((names == "copy in") | (names == "copy out"))),
                gather_forward_ns=spent(forward),
                gather_forward_exposed_ns=alone(forward),
                gather_backward_ns=spent(backward),
                gather_backward_exposed_ns=alone(backward),
                scatter_ns=spent(scatters),
                scatter_exposed_ns=alone(scatters),
            )
        )
    return found


def _before_backward(timeline: Timeline, mine: Any, names: Any) -> Any:
    """Which of a unit's spans are followed by its backward, not its forward."""
    computing = np.flatnonzero(mine & ((names == "forward") | (names == "backward")))
    computing = computing[np.argsort(timeline.start_ns[computing], kind="stable")]
    if not len(computing):
        return np.zeros(len(timeline), dtype=np.bool_)
    place = np.searchsorted(timeline.start_ns[computing], timeline.start_ns, side="left")
    known = place < len(computing)
    return known & (names[computing[np.minimum(place, len(computing) - 1)]] == "backward")


def traffic_terms(predicted: Sequence[CollectiveProfile], rank: RankSummary) -> list[Term]:
    """Calls and bytes of one step; bytes only where the trace tells them."""
    ours: dict[str, tuple[int, int]] = {}
    for one in predicted:
        name = one.op.replace("_", "-")
        calls, size = ours.get(name, (0, 0))
        ours[name] = (calls + one.calls, size + one.bytes)
    steps = max(1, len(rank.steps))
    theirs = {one.operation: one for one in rank.collectives}
    terms = []
    for name in sorted({*ours, *theirs}):
        calls, size = ours.get(name, (0, 0))
        real = theirs.get(name)
        terms.append(Term(f"{name}: calls", calls, real.calls / steps if real else 0))
        if real is None or real.moved_bytes is not None:
            moved = (real.moved_bytes or 0) / steps if real else 0
            terms.append(Term(f"{name}: bytes", size, moved))
    return terms


def side_by_side(predicted: Timeline, measured: Timeline, window: tuple[int, int]) -> list[Any]:
    """Both steps as events of one Chrome trace, beginning at the same moment."""
    return [
        *chrome_events(predicted, "simulated", 0),
        *chrome_events(measured.cut(window), "measured", 1),
    ]
