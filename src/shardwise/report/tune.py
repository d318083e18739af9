"""The screen of `shardwise tune`: the fastest configuration, then every benchmark."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from shardwise.report.screen import screen, terminal_table
from shardwise.report.table import ERROR, Cell, Column, Table, error_cell
from shardwise.spec.quantity import show_seconds
from shardwise.step.profile import relative_error
from shardwise.step.words import percent
from shardwise.trials.calibrate.tune import Probe, Stopped, TuneResult

_COLUMNS = (
    Column("name", "strategy x micro-batch", left=True),
    Column("predicted_s", "predicted step", show_seconds),
    Column("measured_s", "measured step", show_seconds),
    ERROR,
    Column("tokens_per_s", "tokens/s", lambda speed: f"{speed:,.0f}"),
)


def probes_table(tuned: TuneResult) -> Table:
    """One row per benchmark, in the order they ran."""
    table = Table(_COLUMNS)
    for probe in tuned.probes:
        if probe.measured_s is None:
            table.add(probe.candidate.name, probe.predicted_s, Cell(None, "failed"))
            continue
        error = relative_error(probe.predicted_s, probe.measured_s)
        table.add(
            *(probe.candidate.name, probe.predicted_s, probe.measured_s),
            *(error_cell(error), probe.tokens_per_s),
            strong=probe is tuned.best,
        )
    return table


def print_tuned(tuned: TuneResult, candidates: int, output: Path) -> None:
    """Print the fastest configuration, why benchmarking ended, and each benchmark."""
    out = screen()
    best = tuned.best
    if best is None:
        out.print(Text("No benchmark finished.", style="bold red"))
    else:
        out.print(Text(_fastest(best), "bold"))
        out.print(
            f"Benchmarked {len(tuned.probes)} of {candidates} configurations; "
            f"{stopped_words(tuned.stopped, tuned.error)}."
        )
        out.print(f"Written to {output}.", soft_wrap=True)
    out.print()
    out.print(terminal_table(probes_table(tuned)))
    for probe in tuned.probes:
        if probe.failure:
            out.print(f"{probe.candidate.name} failed: {probe.failure}", style="yellow")


def _fastest(best: Probe) -> str:
    """Sentence: the fastest configuration and its measured tokens/s."""
    return f"Fastest: {best.candidate.name}, {best.tokens_per_s:,.0f} tokens/s measured"


def stopped_words(stopped: Stopped, error: float) -> str:
    """Phrase: why no further configuration was benchmarked; `error` is the prediction's."""
    if stopped == "rest is slower":
        return f"the others are slower even if predictions are off by {percent(error)}"
    if stopped == "limit reached":
        return "that is the limit of --top"
    return "that is all of them"
