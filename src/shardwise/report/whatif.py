"""What-if tables, what changed from row to row, and thresholds, for a person."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from textwrap import fill

from rich.console import Console
from rich.text import Text

from shardwise.planning.money import Budget
from shardwise.planning.problem import Problem
from shardwise.planning.whatif import Point, Solved, changes
from shardwise.report.money import cost_cells, cost_columns, tokens_words
from shardwise.report.screen import bar, plain_table, screen
from shardwise.report.strategy import (
    batch_words,
    blocks_of,
    layout_words,
    recompute_cell,
    shorthand,
)
from shardwise.report.table import Column, Table, terminal_table
from shardwise.spec.quantity import GIB, show_count, show_seconds
from shardwise.spec.strategy import show_recompute

_NAMES = {"seq-len": "sequence", "global-batch": "batch"}


def print_heading(problem: Problem, fixed: bool) -> None:
    out = screen()
    job = problem.job
    batch = f", {show_count(job.global_batch)} tokens a step" if job.global_batch else ""
    how = "the same configuration everywhere" if fixed else "planned anew at each point"
    out.print(
        Text(problem.model.name, style="bold")
        + Text(f" on {problem.cluster}, sequences of {job.seq_len:,}{batch}, predicted; {how}")
    )


def print_study(name: str, points: Sequence[Point], budget: Budget) -> None:
    """One row per value, and what made the difference between neighbours."""
    out = screen()
    table = plain_table(gap=1)
    table.add_column(_NAMES.get(name, name), justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    for column in ("step", "tokens/s", "MFU", "GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for point in points:
        c = point.candidate
        if c is None:
            table.add_row(point.value, "cannot be" if point.refused else "nothing fits")
            continue
        table.add_row(
            point.value,
            shorthand(c.strategy),
            batch_words(c.strategy),
            recompute_cell(c.strategy, blocks_of(point.problem.model)),
            _short_seconds(c.step_s),
            _short_count(c.tokens_per_s),
            f"{point.mfu:.1%}",
            f"{c.needed_bytes / GIB:,.1f}",
            {"bandwidth": "network"}.get(point.binding, point.binding),
        )
    out.print()
    out.print(table)
    if name == "devices":
        _print_scaling(out, points)
    sentences = [f"{point.value}: {point.refused}." for point in points if point.refused]
    possible = [point for point in points if not point.refused]
    sentences += [
        f"{before.value} to {after.value}: {changes(before, after)}"
        for before, after in pairwise(possible)
        if changes(before, after)
    ]
    if sentences:
        out.print()
    for sentence in sentences:
        out.print(
            fill(sentence, out.width, initial_indent="- ", subsequent_indent="  "), soft_wrap=True
        )
    _print_costs(out, name, points, budget)


def _short_seconds(seconds: float) -> str:
    """Three digits: a table has no room for more."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _short_count(value: float) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def _print_scaling(out: Console, points: Sequence[Point]) -> None:
    """Tokens/s per device, against the first that fits."""
    fitting = [(p, p.candidate) for p in points if p.candidate]
    if len(fitting) < 2:
        return
    out.print()
    first, c = fitting[0]
    alone = c.tokens_per_s / first.problem.cluster.devices
    for point, candidate in fitting:
        kept = candidate.tokens_per_s / point.problem.cluster.devices / alone
        told = f" {kept:.0%} of the speed per device"
        out.print(Text(f"{point.value:>8} ") + bar(min(kept, 1.0)) + Text(told))


def _print_costs(out: Console, name: str, points: Sequence[Point], budget: Budget) -> None:
    if not budget.given:
        return
    table = Table((Column(name, _NAMES.get(name, name)), *cost_columns(budget)))
    for point in points:
        if point.candidate is not None:
            speed = point.candidate.tokens_per_s
            table.add(point.value, *cost_cells(budget, speed, point.problem.cluster))
    out.print()
    out.print(f"Cost of {tokens_words(budget)}", style="bold")
    out.print(terminal_table(table))


def print_solved(solved: Solved) -> None:
    out = screen()
    name = _NAMES.get(solved.name, solved.name)
    out.print()
    if solved.point is None or solved.point.candidate is None:
        best = max((p for p in solved.tried if p.candidate), key=_speed, default=None)
        nearest = ""
        if best is not None and best.candidate is not None:
            c = best.candidate
            waits = c.exposed_s / c.step_s
            nearest = (
                f" The best was MFU {best.mfu:.0%} at {best.value}: {show_seconds(c.step_s)} "
                f"a step, {waits:.1%} of it waiting for the network."
            )
        out.print(Text(f"No {name} in reach gives {solved.target}.", style="bold") + Text(nearest))
        return
    point, c = solved.point, solved.point.candidate
    out.print(
        Text(f"{point.value}", style="bold green")
        + Text(f" is the least {name} for {solved.target}:")
    )
    per_device = c.strategy.micro_batch * c.strategy.accumulate * point.problem.job.seq_len
    out.print(
        f"{layout_words(c.strategy)}, {per_device:,} tokens per device and step, recompute "
        f"{show_recompute(c.strategy.recompute)}: {show_seconds(c.step_s)} a step, MFU "
        f"{point.mfu:.1%}, {c.exposed_s / c.step_s:.1%} of it waiting for the network, "
        f"{c.needed_bytes / GIB:,.1f} GiB."
    )


def _speed(point: Point) -> float:
    return point.candidate.tokens_per_s if point.candidate else 0.0
