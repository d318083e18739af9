"""Tables of FSDP units: compute, all-gather and reduce-scatter time, simulated and measured."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.observe.against import predicted_units
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import UnitTime
from shardwise.report.page.bars import badge
from shardwise.report.page.markup import Content, Markup, element, fragment, table
from shardwise.report.page.subject import Subject
from shardwise.report.trace import merge_equal_rows, unit_cells
from shardwise.step.words import milliseconds

_MAX_ROWS = 200
_COLUMNS = ("forward", "backward", "copies", "all-gather forward", "all-gather backward",
            "reduce-scatter")  # fmt: skip


def units_section(subjects: Sequence[Subject]) -> Markup | None:
    """A table per subject with units; folded if there are several subjects."""
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
            "Milliseconds per step, the exposed part in brackets. Neighbouring units with equal "
            "values share a row.",
        ),
        drawn,
    )


def _tables(one: Subject) -> list[Markup]:
    """Tables of the units of one subject: measured on one rank, and simulated."""
    tables = []
    if one.traced is not None:
        rank = next((r for r in one.traced.summary.ranks if r.units), None)
        if rank is not None:
            tables.append(_table(rank.units, rank, f"FSDP unit, {rank.name}", "measured"))
    if one.simulated is not None:
        units = predicted_units(one.simulated)
        if units:
            tables.append(_table(units, None, "FSDP unit", "simulated"))
    return tables


def _table(units: Sequence[UnitTime], rank: RankSummary | None, title: str, kind: str) -> Markup:
    """One table of units; `rank` is None for a simulated step."""
    rows = merge_equal_rows([(unit.unit, unit_cells(unit, rank, _short)) for unit in units])
    left = len(rows) - _MAX_ROWS
    more = element("p", f"{left} more rows not shown.", class_="fine") if left > 0 else None
    return fragment(
        table(
            [fragment(f"{title} ", badge(kind)), *_COLUMNS],
            [[name, *cells] for name, cells in rows[:_MAX_ROWS]],
        ),
        more,
    )


def _short(nanoseconds: float) -> str:
    """Nanoseconds as milliseconds, without a unit."""
    return milliseconds(nanoseconds, ".3g", 99.5)
