"""A plan as advice for a person: what to run, why, and what else was looked at."""

from __future__ import annotations

from textwrap import fill

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.planning.plan import Plan
from shardwise.planning.rows import Candidate
from shardwise.report.estimate import not_compared, print_ways
from shardwise.report.memory_words import memory_words
from shardwise.report.money import cost_words, size_words, sizes_table, tokens_words
from shardwise.report.screen import plain_table, screen
from shardwise.report.strategy import batch_words, configuration_words, recompute_cell, shorthand
from shardwise.report.table import terminal_table
from shardwise.spec.quantity import GIB, show_count, show_gib, show_seconds
from shardwise.spec.strategy import Strategy


def print_plan(plan: Plan, *, top: int, written: str | None, command: str) -> None:
    """One screen of at most 80 columns. `written` is the run.toml that was made, if one was."""
    out = screen()
    problem = plan.problem
    cluster, job = problem.cluster, problem.job
    batch = f", {show_count(job.global_batch)} tokens a step" if job.global_batch else ""
    out.print(
        Text(f"{problem.model.name}", style="bold")
        + Text(f" on {cluster}, sequences of {job.seq_len:,}{batch}, predicted")
    )
    if plan.aim:
        out.print(plan.aim)
    if plan.size_choice:
        out.print(size_words(plan.size_choice))
    out.print()
    if plan.winner is None:
        _print_nothing_fits(out, plan)
        return
    _print_winner(out, plan, plan.winner)
    out.print()
    out.print(Text("Why", style="bold"))
    for sentence in (*plan.why, *plan.limits_why):
        _bullet(out, sentence)
    out.print()
    _print_sizes(out, plan)
    out.print(_table(plan, top))
    _print_notes(out, plan)
    _print_front(out, plan)
    out.print()
    if written:
        out.print(f"Written to {written}. Start it with", style="bold")
    else:
        out.print("Write it with -o run.toml, then start it with", style="bold")
    out.print(f"  {command}", soft_wrap=True)


def _bullet(out: Console, sentence: str) -> None:
    out.print(
        fill(sentence, out.width, initial_indent="- ", subsequent_indent="  "), soft_wrap=True
    )


def _print_winner(out: Console, plan: Plan, winner: Candidate) -> None:
    cluster = plan.problem.cluster
    low, high = plan.interval
    out.print(Text("Recommended: ") + Text(_configuration(plan, winner.strategy), "bold green"))
    between = (
        f"{show_seconds(winner.step_s * (1 + low))} to {show_seconds(winner.step_s * (1 + high))}"
    )
    per_device = winner.tokens_per_s / cluster.devices
    out.print(
        f"A step {_of_tokens(plan, winner)}takes {show_seconds(winner.step_s)} ({between}): "
        f"{per_device:,.0f} tokens/s per device, {show_count(winner.tokens_per_s)} in all, MFU "
        f"{plan.mfu(winner):.0%}."
    )
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


def _configuration(plan: Plan, strategy: Strategy) -> str:
    seq_len, blocks = plan.problem.job.seq_len, plan.units.blocks
    return configuration_words(strategy, seq_len=seq_len, blocks=blocks)


def _of_tokens(plan: Plan, winner: Candidate) -> str:
    """The real batch, where it is not the one that was asked for."""
    asked, real = plan.problem.job.global_batch, plan.problem.job.tokens_per_step(winner.strategy)
    if asked is None or abs(real / asked - 1) < 0.001:
        return ""
    return f"of {real:,} tokens ({real / asked - 1:+.1%} against what was asked for) "


def _print_sizes(out: Console, plan: Plan) -> None:
    """For money: the cost on each part of the cluster."""
    if plan.size_choice is None or not plan.size_choice.sizes:
        return
    out.print(f"Cost of {tokens_words(plan.budget)} by size", style="bold")
    chosen = plan.problem.cluster.devices
    out.print(terminal_table(sizes_table(plan.size_choice.sizes, plan.budget, chosen)))
    out.print()


def _table(plan: Plan, top: int) -> Table:
    table = plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("layout")
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("MFU", justify="right", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    shown = ranked(plan, top)
    for number, candidate in enumerate(shown, start=1):
        _add(table, plan, str(number), candidate, style="bold" if number == 1 else "")
    for baseline in plan.baselines:
        if baseline.candidate is not None:
            if not any(c.strategy == baseline.strategy for c in shown):
                _add(table, plan, baseline.name, baseline.candidate)
        else:
            size = f"{baseline.needed_bytes / GIB:,.1f}"
            table.add_row(
                baseline.name,
                shorthand(baseline.strategy),
                batch_words(baseline.strategy),
                recompute_cell(baseline.strategy, plan.units.blocks),
                *("does not fit", "", "", size),
            )
    return table


def ranked(plan: Plan, top: int) -> list[Candidate]:
    """The winner, then the best of the other layouts."""
    assert plan.winner is not None
    others = [c for c in plan.layouts if c.layout != plan.winner.layout]
    return [plan.winner, *others][:top]


def _add(table: Table, plan: Plan, name: str, c: Candidate, style: str = "") -> None:
    table.add_row(
        name,
        shorthand(c.strategy),
        batch_words(c.strategy),
        recompute_cell(c.strategy, plan.units.blocks),
        show_seconds(c.step_s),
        show_count(c.tokens_per_s),
        f"{plan.mfu(c):.0%}",
        f"{c.needed_bytes / GIB:,.1f}",
        style=style,
    )


def _print_notes(out: Console, plan: Plan) -> None:
    now = next((b for b in plan.baselines if b.name == "now"), None)
    if now is not None and plan.winner is not None and now.strategy == plan.winner.strategy:
        out.print("The first row is what runs now.")
    alike = plan.indistinguishable()
    low, high = plan.comparison
    if alike > 1:
        out.print(
            f"{alike} layouts are indistinguishable: they lie nearer than predictions on one "
            f"machine can tell apart ({low:+.0%} to {high:+.0%})."
            + (" The simplest of the fastest comes first." if plan.objective != "memory" else "")
        )
    out.print(
        f"{plan.considered:,} configurations priced, {plan.fitting:,} fit." + _rejected(plan),
        style="dim",
    )
    for tip in plan.tips:
        out.print(tip, style="dim")


def _rejected(plan: Plan) -> str:
    kinds: dict[str, float] = {}
    for miss in plan.rejected:
        kind = shorthand(miss.strategy)
        kinds[kind] = min(kinds.get(kind, miss.needed_bytes), miss.needed_bytes)
    if not kinds:
        return ""
    listed = [f"{kind} ({size / GIB:,.0f} GiB)" for kind, size in list(kinds.items())[:4]]
    more = f" and {len(kinds) - 4} more" if len(kinds) > 4 else ""
    return f" Never fit: {', '.join(listed)}{more}."


def _print_front(out: Console, plan: Plan) -> None:
    if not plan.front or plan.winner is None:
        return
    out.print()
    out.print(Text("To take less memory", style="bold"))
    for candidate in plan.front[:3]:
        loss = candidate.tokens_per_s / plan.winner.tokens_per_s - 1
        what = configuration_words(candidate.strategy, blocks=plan.units.blocks)
        line = f"{candidate.needed_bytes / GIB:5.1f} GiB, {loss:+.0%}: {what}"
        out.print(
            fill(line, out.width, initial_indent="  ", subsequent_indent="    "), soft_wrap=True
        )


def nearest_words(plan: Plan) -> str:
    """What came nearest where nothing fits, as a sentence without its full stop."""
    nearest = plan.rejected[0]
    return (
        f"The nearest is {_configuration(plan, nearest.strategy)}: it needs "
        f"{show_gib(nearest.needed_bytes)}, and a device can safely give "
        f"{show_gib(plan.limit_bytes)}"
    )


def _print_nothing_fits(out: Console, plan: Plan) -> None:
    likely = any(tip.startswith("At risk") for tip in plan.tips)
    head = "Nothing fits safely." if likely else "Nothing fits."
    out.print(Text(head, style="bold red"))
    if plan.rejected:
        out.print(f"{nearest_words(plan)}.")
    for tip in plan.tips:
        out.print(tip)
    out.print(f"{plan.considered:,} configurations priced." + _rejected(plan), style="dim")
    out.print()
    print_ways(out, plan.ways, of="shardwise estimate")
    if plan.ways:
        out.print("Tensor parallelism would help too; shardwise does not run it.", style="dim")
