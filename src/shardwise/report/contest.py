"""The screen of `shardwise compare`: who is fastest, and whether that can be told."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from shardwise.report.screen import plain_table, screen, show_error
from shardwise.spec.quantity import show_gib, show_seconds
from shardwise.step import relative_error
from shardwise.train.contest import Score


def print_scores(scores: Sequence[Score], rounds: int) -> None:
    """The verdict, then everyone's times; measured unless a column says otherwise."""
    out = screen()
    out.print(Text(verdict(scores), style="bold"))
    table = plain_table()
    for title in ("strategy", "step", "rounds from, to", "tokens/s", "predicted", "error", "peak"):
        left = title == "strategy"
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for score in scores:
        middle, interval = score.median_s, score.interval_s
        if middle is None or interval is None:
            table.add_row(score.name, "failed")
            continue
        guess = score.predicted_s
        table.add_row(
            score.name,
            show_seconds(middle),
            f"{show_seconds(interval[0])}, {show_seconds(interval[1])}",
            f"{score.tokens_per_s:,.0f}" if score.tokens_per_s else "-",
            show_seconds(guess) if guess else "-",
            show_error(relative_error(guess, middle)) if guess else "",
            show_gib(score.peak_bytes) if score.peak_bytes else "-",
        )
    out.print()
    out.print(table)
    out.print(f"Medians over {rounds} rounds, run in turns; the first steps left out.", style="dim")
    for score in scores:
        if score.failures:
            out.print(
                f"{score.name} failed in {len(score.failures)} of {rounds} rounds: "
                f"{score.failures[-1]}",
                style="yellow",
            )


def verdict(scores: Sequence[Score]) -> str:
    """Who is fastest, and who cannot be told from it."""
    done = [score for score in scores if score.median_s is not None]
    if not done:
        return "None of them finished a round."
    best = done[0]
    alike = [score.name for score in done[1:] if score.indistinguishable_from(best)]
    others = [score for score in done[1:] if not score.indistinguishable_from(best)]
    said = f"{best.name} is fastest"
    if alike:
        said = f"{best.name} and {' and '.join(alike)} are indistinguishable"
    if others and best.median_s and others[0].median_s:
        gain = others[0].median_s / best.median_s - 1
        said += f"; {others[0].name} takes {gain:.0%} longer"
    return said + "."
