"""Prediction against measurement: two StepProfiles, term by term, with the prediction error."""

from __future__ import annotations

from typing import NamedTuple

from rich.table import Table as TerminalTable

from shardwise.report.screen import terminal_table
from shardwise.report.table import ERROR, Cell, Column, Table, error_cell
from shardwise.spec.quantity import show_seconds
from shardwise.step.comparison import Term, memory_terms, step_terms, traffic_terms
from shardwise.step.profile import StepProfile, by_operation
from shardwise.step.words import collective_names


class Row(NamedTuple):
    """One term as text, predicted and measured; `error` is None if one value is unknown."""

    name: str
    predicted: str
    measured: str
    error: float | None
    strong: bool = False


def compare(predicted: StepProfile, measured: StepProfile) -> dict[str, list[Row]]:
    """Rows for memory, collectives and step time by heading; empty sections are left out."""
    sections = {
        "Peak memory": _memory(predicted, measured),
        "Collectives per step": _traffic(predicted, measured),
        "Step": _step(predicted, measured),
    }
    return {heading: rows for heading, rows in sections.items() if rows}


_COLUMNS = (
    Column("term", "", left=True),
    Column("predicted", "predicted"),
    Column("measured", "measured"),
    ERROR,
)


def comparison_table(predicted: StepProfile, measured: StepProfile) -> TerminalTable:
    """The table of predicted and measured values that ends every run."""
    table = Table(_COLUMNS)
    for number, (heading, rows) in enumerate(compare(predicted, measured).items()):
        if number:
            table.add()
        table.add(Cell(heading, style="bold"))
        for row in rows:
            style = "bold" if row.strong else ""
            table.add(
                Cell(f"  {row.name}", style=style),
                Cell(row.predicted, style=style),
                Cell(row.measured, style=style),
                error_cell(row.error),
            )
    return terminal_table(table)


def _row(term: Term, strong: bool = False) -> Row:
    """A term as a row of text."""
    return Row(term.name, *term.texts(), term.error, strong)


def _memory(predicted: StepProfile, measured: StepProfile) -> list[Row]:
    """Rows of memory by term at the peak, and the total; empty if memory was not measured."""
    if measured.memory is None:
        return []
    *terms, total = memory_terms(predicted.known_memory, measured.memory)
    return [*map(_row, terms), _row(total, strong=True)]


def _traffic(predicted: StepProfile, measured: StepProfile) -> list[Row]:
    """Rows of calls and bytes per step of each collective."""
    first, second = by_operation(predicted.traffic), by_operation(measured.traffic)
    terms = traffic_terms(first, second, collective_names(first | second))
    return [_row(term) for pair in terms.values() for term in pair] or [Row("none", "", "", None)]


def _step(predicted: StepProfile, measured: StepProfile) -> list[Row]:
    """Rows of step time, its spread, tokens/s and MFU; empty if time was not measured."""
    rows = [_row(term) for term in step_terms(predicted, measured)]
    if rows and measured.time is not None and measured.time.step_s_spread:
        spread = ", ".join(map(show_seconds, measured.time.step_s_spread))
        rows.insert(1, Row("  10th and 90th percentile", "", spread, None))
    return rows
