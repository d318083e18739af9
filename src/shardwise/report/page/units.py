"""FSDP units one by one: how long each computes, gathers and scatters, simulated and measured."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.observe.against import predicted_units
from shardwise.observe.rank.units import UnitTime
from shardwise.report.page.bars import badge
from shardwise.report.page.markup import Content, Markup, element, fragment, table
from shardwise.report.page.subject import Subject
from shardwise.report.trace import merged
from shardwise.report.words import milliseconds

_MOST_ROWS = 200
_COLUMNS = ("forward", "backward", "copies", "gather forward", "gather backward", "scatter")


def units_section(subjects: Sequence[Subject]) -> Markup | None:
    """A table for every subject that has units; several are folded."""
    drawn: list[Content] = []
    for one in subjects:
        tables = _tables(one)
        if not tables:
            continue
        if len(subjects) > 1:
            drawn.append(element("details", element("summary", one.name), tables))
        else:
            drawn += tables
    if not drawn:
        return None
    return fragment(
        element(
            "p",
            "Milliseconds of one step; in brackets those with no compute beside them. Neighbours "
            "that read the same share a row.",
        ),
        drawn,
    )


def _tables(one: Subject) -> list[Markup]:
    found = []
    if one.traced is not None:
        rank = next((r for r in one.traced.summary.ranks if r.units), None)
        if rank is not None:
            steps = max(1, len(rank.steps))
            found.append(_table(rank.units, steps, f"FSDP unit, {rank.name}", "measured"))
    if one.simulated is not None:
        units = predicted_units(one.simulated)
        if units:
            found.append(_table(units, 1, "FSDP unit", "simulated"))
    return found


def _table(units: Sequence[UnitTime], steps: int, title: str, kind: str) -> Markup:
    rows = merged([(unit.unit, _cells(unit, steps)) for unit in units])
    left = len(rows) - _MOST_ROWS
    more = element("p", f"{left} more rows are left out.", class_="fine") if left > 0 else None
    return fragment(
        table(
            [fragment(f"{title} ", badge(kind)), *_COLUMNS],
            [[name, *cells] for name, cells in rows[:_MOST_ROWS]],
        ),
        more,
    )


def _cells(unit: UnitTime, steps: int) -> list[str]:
    def alone(total: int) -> str:
        return _short(total / steps) if total else ""

    def both(total: int, exposed: int) -> str:
        return f"{_short(total / steps)} ({_short(exposed / steps)})" if total else ""

    return [
        alone(unit.forward_ns),
        alone(unit.backward_ns),
        alone(unit.copy_ns),
        both(unit.gather_forward_ns, unit.gather_forward_exposed_ns),
        both(unit.gather_backward_ns, unit.gather_backward_exposed_ns),
        both(unit.scatter_ns, unit.scatter_exposed_ns),
    ]


def _short(nanoseconds: float) -> str:
    return milliseconds(nanoseconds, ".3g", 99.5)
