"""A simulated step beside the measured one, as tables."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from shardwise.observe.against import UNIT_TERMS, Against, Term
from shardwise.report.screen import plain_table, show_error
from shardwise.report.trace import merged
from shardwise.report.words import MILLISECOND, milliseconds
from shardwise.spec.quantity import show_gb, show_whole

MOST_UNITS = 12


def print_against(out: Console, found: Against | None, traffic: list[Term], rank: str) -> None:
    """Terms of the step, then the units that were predicted worst."""
    out.print()
    table = _table(f"one step of {rank}", "simulated" if found else "predicted")
    for term in found.terms if found else []:
        _add(table, term, _time)
    for term in traffic:
        _add(table, term, show_gb if term.name.endswith("bytes") else show_whole)
    out.print(table)
    if found is None:
        out.print(
            "Step times of this CPU are not known; 'shardwise calibrate' learns them from runs.",
            style="dim",
        )
        return
    if not found.units:
        return
    out.print()
    units = plain_table()
    units.add_column("FSDP unit", no_wrap=True)
    for title in UNIT_TERMS:
        units.add_column(title, justify="right", no_wrap=True)
    rows = merged([(unit.unit, [_pair(term) for term in unit.terms]) for unit in found.units])
    for name, cells in rows[:MOST_UNITS]:
        units.add_row(name, *cells)
    out.print(units)
    more = f"; {len(rows) - MOST_UNITS} more rows in --json" if len(rows) > MOST_UNITS else ""
    out.print(f"Milliseconds of a step, simulated > measured{more}.", style="dim")


def _table(title: str, predicted: str) -> Table:
    table = plain_table()
    for column in (title, predicted, "measured", "error"):
        table.add_column(column, justify="left" if column == title else "right", no_wrap=True)
    return table


def _add(table: Table, term: Term, show: Callable[[float], str]) -> None:
    table.add_row(term.name, show(term.predicted), show(term.measured), show_error(term.error))


def _time(nanoseconds: float) -> str:
    return f"{nanoseconds / MILLISECOND:,.2f} ms"


def _pair(term: Term) -> str:
    if not term.predicted and not term.measured:
        return "-"
    return f"{_short(term.predicted)} > {_short(term.measured)}"


def _short(nanoseconds: float) -> str:
    return milliseconds(nanoseconds, ".2g", 9.95)
