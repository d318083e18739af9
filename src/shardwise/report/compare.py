"""Predicted against measured: two StepProfiles, term by term, with the prediction error."""

from __future__ import annotations

from typing import NamedTuple

from rich.table import Table as TerminalTable

from shardwise.report.screen import terminal_table
from shardwise.report.table import ERROR, Cell, Column, Table, error_cell
from shardwise.spec.quantity import GIB, show_gb, show_seconds
from shardwise.step.profile import StepProfile, by_operation, relative_error
from shardwise.step.words import TERMS, collective_names, percent

# Terms that cannot be told apart in a running program; they are compared as one.
WORKING = ("unsharded_gradients", "activations", "logits", "other")
_NAMES = {term: name for term, name in TERMS.items() if term not in WORKING}
_NAMES["gradients"] = "reduced gradients"


class Row(NamedTuple):
    """One term of both profiles; the error is None where one side is not known."""

    name: str
    predicted: str
    measured: str
    error: float | None
    strong: bool = False


def compare(predicted: StepProfile, measured: StepProfile) -> dict[str, list[Row]]:
    """Rows under their headings."""
    sections = {
        "Peak memory": _memory(predicted, measured),
        "Collectives per step": _traffic(predicted, measured),
        "Step": _time(predicted, measured),
    }
    return {heading: rows for heading, rows in sections.items() if rows}


_COLUMNS = (
    Column("term", "", left=True),
    Column("predicted", "predicted"),
    Column("measured", "measured"),
    ERROR,
)


def comparison_table(predicted: StepProfile, measured: StepProfile) -> TerminalTable:
    """The table at the end of every run."""
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


def _memory(predicted: StepProfile, measured: StepProfile) -> list[Row]:
    if measured.memory is None:
        return []
    ours = dict(predicted.known_memory.terms)
    theirs = dict(measured.memory.terms)
    # Compare only terms that both sides know.
    merged = [term for term in ours if term in WORKING or term not in theirs]
    ours["working"] = sum(ours.pop(term) for term in merged)
    unit, factor = ("GiB", GIB) if max(sum(ours.values()), 1) >= GIB else ("MiB", 2**20)
    rows = []
    for term, name in _NAMES.items():
        mine, real = ours.get(term, 0), theirs.get(term, 0)
        if mine or real:
            rows.append(
                Row(
                    name,
                    f"{mine / factor:,.2f} {unit}",
                    f"{real / factor:,.2f} {unit}",
                    relative_error(mine, real),
                )
            )
    mine = predicted.known_memory.peak_allocated_bytes
    real = measured.memory.peak_allocated_bytes
    rows.append(
        Row(
            "total",
            f"{mine / factor:,.2f} {unit}",
            f"{real / factor:,.2f} {unit}",
            relative_error(mine, real),
            strong=True,
        )
    )
    return rows


def _traffic(predicted: StepProfile, measured: StepProfile) -> list[Row]:
    ours, theirs = by_operation(predicted.traffic), by_operation(measured.traffic)
    names = collective_names(ours | theirs)
    rows = []
    for key in sorted(ours | theirs):
        (calls, size), (real_calls, real_size) = ours.get(key, (0, 0)), theirs.get(key, (0, 0))
        name = names[key]
        rows.append(
            Row(
                f"{name}: calls",
                f"{calls:,}",
                f"{real_calls:,}",
                relative_error(calls, real_calls),
            )
        )
        rows.append(
            Row(
                f"{name}: bytes",
                show_gb(size),
                show_gb(real_size),
                relative_error(size, real_size),
            )
        )
    return rows or [Row("none", "", "", None)]


def _time(predicted: StepProfile, measured: StepProfile) -> list[Row]:
    if measured.time is None or measured.throughput is None:
        return []
    seconds, real_seconds = predicted.time, measured.time
    guess = seconds.step_s if seconds else None
    rows = [
        Row(
            "time, median",
            show_seconds(guess) if guess else "",
            show_seconds(real_seconds.step_s),
            relative_error(guess, real_seconds.step_s) if guess else None,
        )
    ]
    if real_seconds.step_s_spread:
        low, high = real_seconds.step_s_spread
        rows.append(
            Row(
                "  10th and 90th percentile", "", f"{show_seconds(low)}, {show_seconds(high)}", None
            )
        )
    rows.append(Row("tokens per second", "", f"{measured.throughput.tokens_per_s:,.0f}", None))
    if measured.throughput.mfu is not None:
        rows.append(Row("MFU", "", percent(measured.throughput.mfu, 1), None))
    return rows
