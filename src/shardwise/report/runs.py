"""The screens of `shardwise runs`: a list of runs, and a comparison of a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from shardwise.report.screen import option, screen, terminal_table
from shardwise.report.table import Cell, Column, Table
from shardwise.runs.compare import ComparedKey, Comparison
from shardwise.runs.record import RunRecord, State, Value
from shardwise.spec.quantity import show_count, show_gib, show_seconds
from shardwise.step.words import signed_percent

STATES: dict[State, str] = {
    "training": "cyan",
    "done": "green",
    "stopped": "",
    "data ended": "",
    "failed": "red",
    "lost": "red",
}
_FORMATS = {
    "parameters": show_count,
    "step_s": show_seconds,
    "predicted_step_s": show_seconds,
    "tokens_per_s": lambda value: f"{value:,.0f}",
    "tokens_per_s_per_device": lambda value: f"{value:,.0f}",
    "mfu": lambda value: f"{value:.1%}",
    "loss": lambda value: f"{value:.4f}",
    "eval_loss": lambda value: f"{value:.4f}",
    "eval_perplexity": lambda value: f"{value:,.2f}",
    "eval_tokens": lambda value: f"{value:,.0f}",
    "eval_s": show_seconds,
    "gradient_norm": lambda value: f"{value:.3f}",
    "peak_bytes": show_gib,
    "predicted_peak_bytes": show_gib,
    "step": lambda value: f"{value:,}",
    "planned_steps": lambda value: f"{value:,}",
}
_TITLES = {
    "step_s": "median step",
    "predicted_step_s": "predicted step",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_device": "tokens/s per device",
    "mfu": "MFU",
    "eval_loss": "held-out loss",
    "eval_perplexity": "held-out perplexity",
    "gradient_norm": "gradient norm",
    "peak_bytes": "peak memory",
    "predicted_peak_bytes": "peak memory, predicted",
}
# Columns of the list: always shown, shown unless `--show` names others, and in CSV and Markdown.
_ALWAYS, _USUAL = ("name", "state", "step", "loss"), ("step_s", "tokens_per_s")
_FILES = (
    *("model", "strategy", "cluster", "planned_steps", *_USUAL, "mfu", "peak_bytes"),
    *("predicted_step_s", "recoveries"),
)
_LEFT_ALIGNED = ("name", "state", "strategy", "model", "cluster")


def show_value(key: str, value: Value) -> str:
    """A value of a run as text; `key` determines its unit and decimals."""
    if key in _FORMATS:
        return _FORMATS[key](value)  # type: ignore[no-untyped-call]
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def runs_table(runs: Sequence[RunRecord], extra: Sequence[str] = ()) -> Table:
    """Table with one row per run; keys in `extra` replace the last two default columns."""
    shown = dict.fromkeys((*_ALWAYS, *(extra or _USUAL)))
    table = Table(
        [
            *(_column(key, on_screen=True) for key in shown),
            *(_column(key, on_screen=False) for key in _FILES if key not in shown),
        ]
    )
    for run in runs:
        flat = run.flat()
        table.add(*(_cell(column.key, flat, run) for column in table.columns))
    return table


def _column(key: str, on_screen: bool) -> Column:
    # The last part of a setting's path: 80 characters have no room for all of it.
    title = {"name": "run"}.get(key, _TITLES.get(key, key.rpartition(".")[2]))
    return Column(
        key,
        title,
        lambda value: show_value(key, value),
        left=key in _LEFT_ALIGNED,
        on_screen=on_screen,
    )


def _cell(key: str, flat: dict[str, Value], run: RunRecord) -> Cell:
    """The cell of one run in the column `key`; empty for a missing value."""
    value = flat.get(key)
    if key == "step":
        return Cell(value, f"{run.step:,}/{run.planned_steps:,}")
    return Cell(value, style=STATES[run.state] if key == "state" else "")


def print_runs(
    runs: Sequence[RunRecord], found: int, place: str, problems: Sequence[str], extra: Sequence[str]
) -> None:
    """Print the number of runs by state, a row per run, and files that could not be read.

    `found` is the number of runs in `place` before filtering. `extra` are more columns.
    """
    out = screen()
    states = Counter(run.state for run in runs)
    if runs:
        counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
        some = f"{len(runs)} of " if len(runs) < found else ""
        heading = Text(f"{some}{found} run{'s'[: found > 1]} in {place}", style="bold")
        out.print(heading + Text(f": {counts}\n"))
        out.print(terminal_table(runs_table(runs, extra)))
    else:
        out.print(f"No run in {place} meets the conditions ({found} read).")
    if states["lost"]:
        out.print("\nLost: no update for 5 minutes; the process ended without saying why.")
    if problems:
        out.print("\nNot read:")
        for problem in problems:
            option(out, problem)


def comparison_table(compared: Comparison) -> Table:
    """Table of settings that differ and of results: a row per key, a column per run."""
    return _compared([*compared.settings, *compared.results], compared.runs, "key")


def _compared(
    rows: Sequence[ComparedKey], runs: Sequence[RunRecord], title: str, change: bool = False
) -> Table:
    """Table of `rows` with a column per run.

    `title` is "setting", "result" or "key". `change` adds a column with the relative change.
    """
    columns = [Column(title, title, left=True)]
    columns += [Column(run.name, run.name, wrap=True) for run in runs]
    if change:
        columns.append(Column("change", "change", signed_percent))
    table = Table(columns)
    for row in rows:
        cells = [
            Cell(value, None if value is None else show_value(row.key, value))
            for value in row.values
        ]
        name = _TITLES.get(row.key, row.key) if title == "result" else row.key
        table.add(Cell(row.key, name), *cells, *([row.change] if change else []))
    return table


def print_comparison(compared: Comparison) -> None:
    """Print the settings that differ, then the results, with a column per run."""
    out = screen()
    if compared.settings:
        out.print(terminal_table(_compared(compared.settings, compared.runs, "setting")))
    else:
        out.print("The settings are equal.")
    two = len(compared.runs) == 2
    out.print()
    out.print(terminal_table(_compared(compared.results, compared.runs, "result", change=two)))
    out.print(
        "Measured unless predicted is said; the loss is of the last log line, times are medians of "
        "the run.",
        style="dim",
    )
