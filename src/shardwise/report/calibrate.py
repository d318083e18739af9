"""The screen of `shardwise calibrate --from-run`: fit quality, then coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from shardwise.observe.observation import Observation
from shardwise.report.screen import plain_table, screen, show_error
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import show_seconds
from shardwise.trials.calibrate.fit import Fit


def print_fit(
    cluster: ClusterSpec,
    observations: Sequence[Observation],
    found: Fit,
    runs: Sequence[Path],
) -> None:
    """Print the step-time error of each run, then the fitted coefficients."""
    out = screen()
    low, high = found.calibration.interval
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    out.print(Text(f"{cluster}, calibrated on {count}", style="bold"))
    out.print(f"Prediction interval: {low:+.0%} to {high:+.0%}")
    table = plain_table()
    for title in ("run", "strategy", "fitted", "measured", "error"):
        table.add_column(title, justify="left" if title in ("run", "strategy") else "right",
                         no_wrap=True, overflow="ellipsis")  # fmt: skip
    for folder, one, error in zip(runs, observations, found.errors, strict=True):
        table.add_row(folder.name, str(one.run.strategy),
                      show_seconds(one.step_s * (1 + error)), show_seconds(one.step_s),
                      show_error(error))  # fmt: skip
    out.print()
    out.print(table)
    terms = plain_table()
    terms.add_column("coefficient", no_wrap=True)
    terms.add_column("fitted", justify="right", no_wrap=True)
    for name, value in found.calibration.coefficients().items():
        terms.add_row(name, f"{value:.4g}")
    out.print()
    out.print(terms)
