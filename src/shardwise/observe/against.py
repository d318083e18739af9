"""Compare a simulated step with the measured one: by term and by FSDP unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.observe.rank.axes import named_by_axis
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import ROOT, UnitTime
from shardwise.step import comparison
from shardwise.step.breakdown import breakdown
from shardwise.step.chrome import chrome_events
from shardwise.step.comparison import Term
from shardwise.step.intervals import uncovered_length, union
from shardwise.step.profile import CollectiveProfile
from shardwise.step.spans import KINDS, Timeline


class UnitTerms(NamedTuple):
    """Terms of one unit, under its measured name."""

    unit: str
    terms: list[Term]


class Against(NamedTuple):
    """Terms of the step of one rank, and of its units; none if the units differ in number."""

    terms: list[Term]
    units: list[UnitTerms]


# Columns of the table of units, and the fields of UnitTime they show.
UNIT_TERMS = {
    "forward": "forward_ns",
    "backward": "backward_ns",
    "gather fwd": "gather_forward_ns",
    "gather bwd": "gather_backward_ns",
    "scatter": "scatter_ns",
}


def against(predicted: Timeline, rank: RankSummary) -> Against:
    """Compare a simulated step with the average profiled step."""
    if not rank.on_cpu:
        # A GPU packs and unpacks with compute kernels.
        computing, copying = KINDS.index("compute"), KINDS.index("copy")
        kinds = np.where(predicted.kind == copying, computing, predicted.kind)
        predicted = replace(predicted, kind=kinds.astype(np.int8))
    simulated = breakdown(predicted)
    terms = [
        Term(name, "ns", getattr(simulated, field), rank.per_step(getattr(rank.profiled, field)))
        for name, field in (
            ("step", "window_ns"),
            ("compute", "compute_ns"),
            ("exposed communication", "exposed_communication_ns"),
            ("exposed copies", "exposed_copy_ns"),
            ("idle", "idle_ns"),
            ("communication (exposed and hidden)", "communication_ns"),
        )
    ]
    return Against([t for t in terms if t.first or t.second], _units(predicted, rank))


def _units(predicted: Timeline, rank: RankSummary) -> list[UnitTerms]:
    simulated = [u for u in predicted_units(predicted) if u.unit != ROOT]
    measured = [u for u in rank.units if u.unit != ROOT]
    if not simulated or len(simulated) != len(measured):
        return []
    return [
        UnitTerms(
            real.unit,
            [Term(name, "ns", getattr(mine, field), rank.per_step(getattr(real, field)))
             for name, field in UNIT_TERMS.items()],
        )
        for mine, real in zip(simulated, measured, strict=True)
    ]  # fmt: skip


def predicted_units(timeline: Timeline) -> list[UnitTime]:
    """Time by unit of a simulated step, in forward order."""
    compute = timeline.covered("compute")
    names = np.asarray(timeline.names, dtype=object)[timeline.name]
    order = np.argsort(timeline.start_ns, kind="stable")
    units = list(dict.fromkeys(int(u) for u in timeline.unit[order] if u >= 0))
    times = []
    for unit in units:
        mine = timeline.unit == unit
        gathers = mine & (names == "all-gather")
        backward = gathers & _before_backward(timeline, mine, names)
        forward = gathers & ~backward
        scatters = mine & (names == "reduce-scatter")

        def spent(rows: Any) -> int:
            return int((timeline.end_ns[rows] - timeline.start_ns[rows]).sum())

        def exposed(rows: Any) -> int:
            return uncovered_length(union(timeline.start_ns[rows], timeline.end_ns[rows]), compute)

        times.append(
            UnitTime(
                unit=timeline.units[unit],
                gathers=int(gathers.sum()),
                scatters=int(scatters.sum()),
                forward_ns=spent(mine & (names == "forward")),
                backward_ns=spent(mine & (names == "backward")),
                copy_ns=spent(mine & ((names == "copy in") | (names == "copy out"))),
                gather_forward_ns=spent(forward),
                gather_forward_exposed_ns=exposed(forward),
                gather_backward_ns=spent(backward),
                gather_backward_exposed_ns=exposed(backward),
                scatter_ns=spent(scatters),
                scatter_exposed_ns=exposed(scatters),
            )
        )
    return times


def _before_backward(timeline: Timeline, mine: Any, names: Any) -> Any:
    """Whether the next compute of the unit after each span is its backward."""
    computing = np.flatnonzero(mine & ((names == "forward") | (names == "backward")))
    computing = computing[np.argsort(timeline.start_ns[computing], kind="stable")]
    if not len(computing):
        return np.zeros(len(timeline), dtype=np.bool_)
    following = np.searchsorted(timeline.start_ns[computing], timeline.start_ns, side="left")
    known = following < len(computing)
    next_compute = computing[np.minimum(following, len(computing) - 1)]
    return known & (names[next_compute] == "backward")


def traffic_terms(predicted: Sequence[CollectiveProfile], rank: RankSummary) -> list[Term]:
    """Calls and bytes per step; bytes only where the trace records them."""
    expected: dict[str, tuple[int, int]] = {}
    for one in predicted:
        name = named_by_axis(one.op.replace("_", "-"), one.group)
        calls, size = expected.get(name, (0, 0))
        expected[name] = (calls + one.calls, size + one.bytes)
    measured = {
        one.operation: (
            rank.per_step(one.calls),
            None if one.moved_bytes is None else rank.per_step(one.moved_bytes),
        )
        for one in rank.collectives
    }
    names = {name: name for name in (*expected, *measured)}
    terms = comparison.traffic_terms(expected, measured, names)
    return [term for pair in terms.values() for term in pair if term.second is not None]


def side_by_side(predicted: Timeline, measured: Timeline, window: tuple[int, int]) -> list[Any]:
    """Chrome trace events of both steps, starting at the same time."""
    return [
        *chrome_events(predicted, "simulated", 0),
        *chrome_events(measured.cut(window), "measured", 1),
    ]
