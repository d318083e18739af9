"""The screen of `shardwise tune`: the winner, then every probe."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from shardwise.calibrate.tune import Tuned
from shardwise.report.screen import plain_table, screen, show_error
from shardwise.spec.quantity import show_seconds
from shardwise.step import relative_error


def print_tuned(tuned: Tuned, candidates: int, output: Path) -> None:
    """What won by how much, and what was tried."""
    out = screen()
    best = tuned.best
    if best is None:
        out.print(Text("No probe finished.", style="bold red"))
    else:
        out.print(
            Text(f"{best.candidate.name} is fastest: {best.tokens_per_s:,.0f} tokens/s", "bold")
        )
        out.print(
            f"{len(tuned.probes)} of {candidates} configurations probed; {tuned.reason}. Written "
            f"to {output}."
        )
    table = plain_table()
    for title in ("probe", "predicted", "measured", "error", "tokens/s"):
        left = title == "probe"
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for one in tuned.probes:
        guess = show_seconds(one.predicted_s)
        if one.measured_s is None:
            table.add_row(one.candidate.name, guess, "failed")
            continue
        table.add_row(
            one.candidate.name,
            guess,
            show_seconds(one.measured_s),
            show_error(relative_error(one.predicted_s, one.measured_s)),
            f"{one.tokens_per_s:,.0f}",
        )
    out.print()
    out.print(table)
    for one in tuned.probes:
        if one.failure:
            out.print(f"{one.candidate.name}: {one.failure}", style="yellow")
