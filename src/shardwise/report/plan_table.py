"""The tables of a plan: layouts compared, with a note on unusual settings."""

from __future__ import annotations

from shardwise.planning.plan import Baseline, Plan
from shardwise.report.money import added_cost_cells, added_cost_columns, sizes_table
from shardwise.report.plan_words import ranked_layouts
from shardwise.report.table import Cell, Column, Table
from shardwise.spec.quantity import in_gib, show_count, show_seconds
from shardwise.spec.strategy_words import batch_words, recompute_cell, shorthand, unusual_settings
from shardwise.step.words import percent


def plan_table(plan: Plan, top: int) -> Table:
    """The table for CSV and Markdown: cost by number of devices for money, else layouts."""
    if plan.size_choice is not None and plan.size_choice.sizes:
        chosen = plan.problem.cluster.devices
        return sizes_table(plan.size_choice.sizes, plan.budget, chosen)
    return layouts_table(plan, top)


def layouts_table(plan: Plan, top: int, mark: bool = True) -> Table:
    """Table of the winner, the best of other layouts, and the baselines; all predicted.

    `mark` puts a star on rows whose settings `unusual_words` names.
    """
    table = Table(
        (
            Column("rank", "", left=True),
            Column("layout", "layout", left=True),
            Column("micro_batch", "micro × accum"),
            Column("accumulate", "accumulation", on_screen=False),
            Column("recompute", "recompute", left=True),
            Column("blocks_per_unit", "blocks per unit", on_screen=False),
            Column("prefetch", "prefetch", on_screen=False),
            Column("forward_prefetch", "forward prefetch", on_screen=False),
            Column("tokens_per_step", "tokens per step", lambda n: f"{n:,}", on_screen=False),
            Column("step_s", "step", show_seconds),
            Column("tokens_per_s", "tokens/s", show_count),
            Column("mfu", "MFU", percent),
            Column("needed_bytes", "GiB", in_gib),
            *added_cost_columns(plan.budget),
        )
    )
    for rank, one in _table_rows(plan, top):
        star = "*" if mark and unusual_settings(one.strategy) else ""
        _add_row(table, plan, rank, one, star)
    return table


def _table_rows(plan: Plan, top: int) -> list[tuple[str, Baseline]]:
    """Ranked rows, then the baselines that are not among them, as (rank or "now", row)."""
    best = ranked_layouts(plan, top)
    rows = [
        (str(rank), Baseline("", c.strategy, c.needed_bytes, "fits", c))
        for rank, c in enumerate(best, start=1)
    ]
    shown = [candidate.strategy for candidate in best]
    return [
        *rows,
        *(("now" if b.name == "now" else "", b) for b in plan.baselines if b.strategy not in shown),
    ]


def _add_row(table: Table, plan: Plan, rank: str, one: Baseline, star: str) -> None:
    """Append the row of one configuration; `star` follows its layout."""
    strategy, candidate, cluster = one.strategy, one.candidate, plan.problem.cluster
    table.add(
        rank,
        Cell(shorthand(strategy), shorthand(strategy) + star),
        Cell(strategy.micro_batch, batch_words(strategy)),
        strategy.accumulate,
        Cell(strategy.recompute, recompute_cell(strategy, plan.units.blocks)),
        *(strategy.blocks_per_unit, strategy.prefetch, strategy.forward_prefetch),
        plan.problem.job.tokens_per_step(strategy),
        Cell(candidate.step_s) if candidate else Cell(None, one.verdict),
        candidate.tokens_per_s if candidate else None,
        plan.mfu(candidate) if candidate else None,
        round(one.needed_bytes),
        *(added_cost_cells(plan.budget, candidate.tokens_per_s, cluster) if candidate else ()),
        strong=candidate is plan.winner,
    )


def unusual_words(plan: Plan, top: int) -> str:
    """Sentence on unusual settings of starred rows; empty if there are none."""
    rows: dict[str, list[str]] = {}
    for rank, one in _table_rows(plan, top):
        settings = ", ".join(unusual_settings(one.strategy))
        if settings:
            rows.setdefault(settings, []).append(rank or shorthand(one.strategy))
    notes = [
        f"row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {settings}"
        for settings, numbers in rows.items()
    ]
    return f"* {'; '.join(notes)}." if notes else ""
