"""Compare a simulated step with the measured one: by term and by FSDP unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.observe.rank.axes import operation_along_axis
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
    """Predicted and measured times of one FSDP unit; `unit` is its name in the trace."""

    unit: str
    terms: list[Term]


class RankComparison(NamedTuple):
    """Predicted and measured times of one rank's step, and of each of its FSDP units.

    `units` is empty if prediction and trace have different numbers of units.
    """

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


def compare_rank(predicted: Timeline, rank: RankSummary) -> RankComparison:
    """Compare a simulated step with the average profiled step of a rank, in nanoseconds per step.

    A term that is 0 in both is left out.
    """
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
    return RankComparison([t for t in terms if t.first or t.second], _unit_terms(predicted, rank))


def _unit_terms(predicted: Timeline, rank: RankSummary) -> list[UnitTerms]:
    """Terms of each FSDP unit except the root, in nanoseconds per step, in forward order.

    Empty if prediction and trace have different numbers of units.
    """
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
    """Time of each FSDP unit in a simulated step, in forward order."""
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
            """Total nanoseconds of these spans."""
            return int((timeline.end_ns[rows] - timeline.start_ns[rows]).sum())

        def exposed(rows: Any) -> int:
            """Nanoseconds in which one of these spans runs and nothing computes."""
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
    """Mask of the timeline's spans: whether the unit's next compute is a backward.

    The next compute is the first that starts at or after the span's start; without one, False.
    `mine` marks the spans of the unit, `names` has the name of each span.
    """
    computing = np.flatnonzero(mine & ((names == "forward") | (names == "backward")))
    computing = computing[np.argsort(timeline.start_ns[computing], kind="stable")]
    if not len(computing):
        return np.zeros(len(timeline), dtype=np.bool_)
    following = np.searchsorted(timeline.start_ns[computing], timeline.start_ns, side="left")
    known = following < len(computing)
    next_compute = computing[np.minimum(following, len(computing) - 1)]
    return known & (names[next_compute] == "backward")


def traffic_terms(predicted: Sequence[CollectiveProfile], rank: RankSummary) -> list[Term]:
    """Predicted and measured calls and bytes per step, by operation.

    A quantity that the trace does not record is left out.
    """
    expected: dict[str, tuple[int, int]] = {}
    for one in predicted:
        name = operation_along_axis(one.op.replace("_", "-"), one.group)
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


def chrome_comparison(
    predicted: Timeline, measured: Timeline, window: tuple[int, int]
) -> list[Any]:
    """Chrome trace events of a simulated and a measured step, as processes 0 and 1."""
    return [
        *chrome_events(predicted, "simulated", 0),
        *chrome_events(measured.cut(window), "measured", 1),
    ]
