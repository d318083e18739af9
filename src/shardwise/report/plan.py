"""The plan screen: what to run, why, the alternatives, lower-memory options, how to start."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardwise.planning.plan import Baseline, Plan
from shardwise.planning.reasons import LeastMemory, OtherParallelism, RiskyAlternative, StepBatch
from shardwise.planning.rows import Candidate
from shardwise.report.adapter import adapter_words
from shardwise.report.estimate import print_ways
from shardwise.report.estimate_words import not_compared
from shardwise.report.memory_words import memory_words, show_memory
from shardwise.report.money import (
    added_cost_cells,
    added_cost_columns,
    cost_words,
    size_words,
    sizes_table,
    tokens_words,
)
from shardwise.report.plan_words import (
    alike_words,
    nearest_words,
    planned_words,
    ranked,
    step_words,
)
from shardwise.report.reasons import (
    plan_tips,
    reason_words,
    rule_words,
    speed_words,
)
from shardwise.report.screen import bullet, option, screen, terminal_table
from shardwise.report.strategy import (
    arithmetic_words,
    batch_words,
    compile_words,
    configuration_words,
    recompute_cell,
    shorthand,
    unusual_settings,
)
from shardwise.report.table import Cell, Column, Table
from shardwise.report.words import percent
from shardwise.spec.quantity import GIB, show_count, show_seconds
from shardwise.spec.strategy import Strategy

_LOWER_MEMORY = 3
_NEVER_FIT = 4


def print_plan(plan: Plan, *, top: int, written: str | None, command: str | None) -> None:
    """Print at most 80 columns. `written` is the run.toml that was made, if one was.

    `command` starts the run; None where another stack does.
    """
    out = screen()
    problem = plan.problem
    out.print(
        Text(problem.model.name, style="bold")
        + Text(f" on {problem.cluster}, sequence length {problem.job.seq_len:,}, predicted")
    )
    if problem.model.adapter is not None:
        units = plan.units.of(problem.base.but(blocks_per_unit=1))
        out.print(adapter_words(problem.model, units.trained_numel, units.numel))
    if plan.aim:
        out.print(reason_words(plan.aim, plan.units.blocks))
    if plan.size_choice:
        out.print(size_words(plan.size_choice))
    out.print()
    if plan.winner is None:
        _print_nothing_fits(out, plan)
        return
    _print_winner(out, plan, plan.winner)
    _heading(out, "Why this layout")
    for reason in (*plan.why, *plan.limits_why):
        if not isinstance(reason, StepBatch):  # above
            bullet(out, reason_words(reason, plan.units.blocks))
    if plan.size_choice is not None and plan.size_choice.sizes:
        _heading(out, f"Cost of {tokens_words(plan.budget)} by size")
        chosen = problem.cluster.devices
        out.print(terminal_table(sizes_table(plan.size_choice.sizes, plan.budget, chosen)))
    _heading(out, "Layouts compared")
    out.print(terminal_table(layouts_table(plan, top)))
    _print_notes(out, plan, top)
    _print_lower_memory(out, plan)
    if command is None:
        return
    _heading(
        out, f"Start (written to {written})" if written else "Start (write it with -o run.toml)"
    )
    out.print(f"  {command}", soft_wrap=True)


def _heading(out: Console, title: str) -> None:
    out.print()
    out.print(Text(title, style="bold"))


def _print_winner(out: Console, plan: Plan, winner: Candidate) -> None:
    cluster = plan.problem.cluster
    out.print(Text("Recommended: ") + Text(planned_words(plan, winner.strategy), "bold green"))
    out.print(f"Step: {step_words(plan, winner)}")
    out.print(*(reason_words(reason) for reason in plan.why if isinstance(reason, StepBatch)))
    out.print(
        memory_words(
            tensors=winner.peak_bytes,
            needed=winner.needed_bytes,
            usable=plan.limit_bytes,
            capacity=cluster.device.capacity,
        )
    )
    cost = cost_words(plan.budget, winner.tokens_per_s, cluster)
    if cost:
        out.print(cost)
    if not plan.fitted:
        out.print(not_compared(cluster).strip())
    for note in arithmetic_words(winner.strategy, plan.problem.job.optimizer):
        out.print(note)
    compiled = compile_words(winner.strategy, plan.problem.model, cluster)
    if compiled:
        out.print(compiled)


def plan_table(plan: Plan, top: int) -> Table:
    """The table of `--csv` and `--markdown`: costs by size for money, else layouts."""
    if plan.size_choice is not None and plan.size_choice.sizes:
        chosen = plan.problem.cluster.devices
        return sizes_table(plan.size_choice.sizes, plan.budget, chosen)
    return layouts_table(plan, top)


def layouts_table(plan: Plan, top: int) -> Table:
    """The recommended configuration, the best of other layouts, and the baselines."""
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
            Column("needed_bytes", "GiB", lambda size: f"{size / GIB:,.1f}"),
            *added_cost_columns(plan.budget),
        )
    )
    for number, candidate in enumerate(ranked(plan, top), start=1):
        _add(table, plan, str(number), candidate.strategy, candidate, candidate.needed_bytes)
    for baseline in _below(plan, top):
        name = "now" if baseline.name == "now" else ""
        _add(table, plan, name, baseline.strategy, baseline.candidate, baseline.needed_bytes)
    return table


def _below(plan: Plan, top: int) -> list[Baseline]:
    """The baselines that are not among the layouts shown."""
    shown = [candidate.strategy for candidate in ranked(plan, top)]
    return [baseline for baseline in plan.baselines if baseline.strategy not in shown]


def _add(
    table: Table,
    plan: Plan,
    rank: str,
    strategy: Strategy,
    candidate: Candidate | None,
    needed: float,
) -> None:
    cluster = plan.problem.cluster
    step = Cell(candidate.step_s) if candidate else Cell(None, "does not fit")
    table.add(
        rank,
        Cell(
            shorthand(strategy), shorthand(strategy) + ("*" if unusual_settings(strategy) else "")
        ),
        Cell(strategy.micro_batch, batch_words(strategy)),
        strategy.accumulate,
        Cell(strategy.recompute, recompute_cell(strategy, plan.units.blocks)),
        *(strategy.blocks_per_unit, strategy.prefetch, strategy.forward_prefetch),
        plan.problem.job.tokens_per_step(strategy),
        step,
        candidate.tokens_per_s if candidate else None,
        plan.mfu(candidate) if candidate else None,
        round(needed),
        *(added_cost_cells(plan.budget, candidate.tokens_per_s, cluster) if candidate else ()),
        strong=candidate is plan.winner,
    )


def unusual_words(plan: Plan, top: int) -> str:
    """The settings of rows that the table marks; empty where it marks none."""
    numbered = [(str(n), c.strategy) for n, c in enumerate(ranked(plan, top), start=1)]
    rows: dict[str, list[str]] = {}
    for row, strategy in (*numbered, *((b.name, b.strategy) for b in _below(plan, top))):
        settings = unusual_settings(strategy).replace(" · ", ", ")
        if settings:
            rows.setdefault(settings, []).append(row)
    notes = [
        f"row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {settings}"
        for settings, numbers in rows.items()
    ]
    return f"* {'; '.join(notes)}." if notes else ""


def _print_notes(out: Console, plan: Plan, top: int) -> None:
    marked = unusual_words(plan, top)
    if marked:
        out.print(marked)
    now = next((b for b in plan.baselines if b.name == "now"), None)
    if now is not None and plan.winner is not None and now.strategy == plan.winner.strategy:
        out.print("Row 1 is the current configuration.")
    alike = plan.too_close_to_call()
    if alike:
        out.print(alike_words(alike))
    if len(plan.layouts) > 1 and plan.objective != "memory":
        out.print(rule_words(plan))
    out.print(
        f"{plan.considered:,} configurations priced, {plan.fitting:,} fit." + _rejected(plan),
        style="dim",
    )
    for tip in plan_tips(plan):
        out.print(tip, style="dim")


def _rejected(plan: Plan) -> str:
    if not plan.rejected:
        return ""
    listed = [
        f"{shorthand(miss.strategy)} ({show_memory(miss.needed_bytes)})"
        for miss in plan.rejected[:_NEVER_FIT]
    ]
    rest = len(plan.rejected) - _NEVER_FIT
    more = f" and {rest} more" if rest > 0 else ""
    return f" Never fit: {', '.join(listed)}{more}."


def _print_lower_memory(out: Console, plan: Plan) -> None:
    if not plan.front or plan.winner is None:
        return
    aim, fastest = plan.aim, plan.winner.tokens_per_s
    title = "Lower-memory options"
    if isinstance(aim, LeastMemory):
        title += f" (below {percent(aim.share)} of the best throughput, compared with it)"
        fastest = aim.fastest_tokens_per_s
    _heading(out, title)
    for candidate in plan.front[:_LOWER_MEMORY]:
        speed = speed_words(candidate.tokens_per_s / fastest - 1)
        what = configuration_words(candidate.strategy, blocks=plan.units.blocks)
        option(out, f"{candidate.needed_bytes / GIB:5.1f} GiB, {speed}: {what}")


def _print_nothing_fits(out: Console, plan: Plan) -> None:
    risky = any(isinstance(tip, RiskyAlternative) for tip in plan.tips)
    head = "No configuration fits safely." if risky else "No configuration fits."
    out.print(Text(head, style="bold red"))
    if plan.rejected:
        out.print(nearest_words(plan))
    for tip in plan.tips:
        if not isinstance(tip, OtherParallelism):
            out.print(reason_words(tip, plan.units.blocks))
    out.print(f"{plan.considered:,} configurations priced." + _rejected(plan), style="dim")
    out.print()
    whose = "" if plan.for_stack else "shardwise estimate"
    print_ways(out, plan.ways, of=whose)
    for tip in plan.tips:
        if plan.ways and isinstance(tip, OtherParallelism):
            out.print(reason_words(tip), style="dim")
