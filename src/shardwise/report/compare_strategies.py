"""The screen of `shardwise compare`: the fastest strategy, then every measurement."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from shardwise.report.screen import screen, terminal_table
from shardwise.report.table import ERROR, Cell, Column, Table, error_cell
from shardwise.spec.quantity import show_gib, show_seconds
from shardwise.step.profile import relative_error
from shardwise.step.words import percent
from shardwise.trials.compare_strategies import Ranking, Score, ranking

_COLUMNS = (
    Column("name", "strategy", left=True),
    Column("median_s", "step", show_seconds),
    Column("fastest_s", "fastest", show_seconds),
    Column("slowest_s", "slowest", show_seconds),
    Column("tokens_per_s", "tokens/s", lambda speed: f"{speed:,.0f}"),
    Column("predicted_s", "predicted", show_seconds),
    ERROR,
    Column("peak_bytes", "peak", show_gib),
    Column("failed_rounds", "failed", on_screen=False),
)


def scores_table(scores: Sequence[Score]) -> Table:
    """One row per strategy, the fastest first; measured unless a column says predicted."""
    table = Table(_COLUMNS)
    for score in scores:
        table.add(*_cells(score))
    return table


def _cells(score: Score) -> list[str | float | Cell | None]:
    """Cells of the row of one strategy; "failed" if no round of it finished."""
    failed = len(score.failures)
    if score.median_s is None or score.interval_s is None:
        empty = [None] * (len(_COLUMNS) - 3)
        return [score.name, Cell(None, "failed"), *empty, failed]
    predicted = score.predicted_s
    error = relative_error(predicted, score.median_s) if predicted else None
    fastest, slowest = score.interval_s
    return [
        *(score.name, score.median_s, fastest, slowest, score.tokens_per_s, predicted),
        error_cell(error),
        score.peak_bytes,
        failed,
    ]


def print_scores(scores: Sequence[Score], rounds: int) -> None:
    """Print the ranking, a row per strategy, and failures."""
    out = screen()
    out.print(Text(ranking_words(ranking(scores)), style="bold"))
    out.print()
    out.print(terminal_table(scores_table(scores)))
    out.print(
        f"Measured: step is the median of {rounds} {'round' if rounds == 1 else 'rounds'}, "
        "fastest and slowest are single rounds, warm-up steps excluded.",
        style="dim",
    )
    for score in scores:
        if score.failures:
            out.print(
                f"{score.name} failed in {len(score.failures)} of {rounds} rounds: "
                f"{score.failures[-1]}",
                style="yellow",
            )


def ranking_words(result: Ranking | None) -> str:
    """Sentence: the fastest strategy, those too close to call, and the next slower one."""
    if result is None:
        return "No strategy finished a round."
    name = result.fastest.name
    close = [score.name for score in result.too_close]
    sentence = f"Fastest: {name}."
    if close:
        sentence = f"Too close to call: {', '.join([name, *close])} (their rounds overlap)."
    if result.next is not None:
        slower = percent(result.next_slower_by)
        sentence += f" Next: {result.next.name}, step {slower} longer."
    return sentence
