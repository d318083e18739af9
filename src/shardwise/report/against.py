"""Tables of a simulated step against the measured step."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.observe.against import UNIT_TERMS, RankComparison
from shardwise.report.screen import plain_table, show_error
from shardwise.report.trace import merge_equal_rows
from shardwise.step.comparison import Term
from shardwise.step.words import milliseconds

MAX_UNITS = 12


def print_rank_comparison(
    out: Console, compared: RankComparison | None, traffic: list[Term], rank: str
) -> None:
    """Print terms of a step, predicted and measured, then FSDP units.

    `compared` is None if the step could not be simulated. `traffic` are terms of collectives.
    """
    out.print()
    out.print(f"Prediction against measurement ({rank}, per step)", style="bold")
    table = _table("", "simulated" if compared else "predicted")
    for term in (*(compared.terms if compared else ()), *traffic):
        table.add_row(term.name, *term.texts(), show_error(term.error))
    out.print(table)
    if compared is None:
        out.print(
            "No step times for this CPU: measure them with 'shardwise calibrate'.",
            style="dim",
        )
        return
    if not compared.units:
        return
    out.print()
    units = plain_table()
    units.add_column("unit", no_wrap=True)
    for title in UNIT_TERMS:
        units.add_column(title, justify="right", no_wrap=True)
    rows = merge_equal_rows(
        [(unit.unit, [_pair(term) for term in unit.terms]) for unit in compared.units]
    )
    for name, cells in rows[:MAX_UNITS]:
        units.add_row(name, *cells)
    out.print("FSDP units (ms per step, simulated → measured)", style="bold")
    out.print(units)
    if len(rows) > MAX_UNITS:
        out.print(f"{len(rows) - MAX_UNITS} more rows in --json.", style="dim")


def _table(title: str, predicted: str) -> Table:
    """An empty table with the columns `title`, `predicted`, "measured" and "error"."""
    table = plain_table()
    for column in (title, predicted, "measured", "error"):
        table.add_column(column, justify="left" if column == title else "right", no_wrap=True)
    return table


def _pair(term: Term) -> str:
    """Milliseconds of both values of a term, as "simulated → measured"; "-" if both are 0."""
    if not term.first and not term.second:
        return "-"
    return " → ".join(term.texts({"ns": _milliseconds}))


def _milliseconds(nanoseconds: float) -> str:
    """Nanoseconds as milliseconds, without a unit."""
    return milliseconds(nanoseconds, ".2g", 9.95)
