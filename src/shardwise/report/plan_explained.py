"""`shardwise plan --explain`: every reason, layout, option and lower-memory configuration."""

from __future__ import annotations

from rich.console import Console

from shardwise.planning.plan import Plan
from shardwise.planning.reasons.limits import OtherParallelism
from shardwise.planning.reasons.reason import compared_words
from shardwise.planning.reasons.warnings import LeastMemory
from shardwise.planning.rows import Candidate
from shardwise.planning.threshold import Threshold
from shardwise.report.money import deadline_words
from shardwise.report.plan import (
    Start,
    is_batch,
    print_changes,
    print_question,
    print_recommended,
    print_shortfall,
    print_sizes,
    start_words,
)
from shardwise.report.plan_table import layouts_table, unusual_words
from shardwise.report.plan_words import rule_words, too_close_words
from shardwise.report.screen import bullet, heading, option, paragraph, screen, terminal_table
from shardwise.spec.quantity import GIB
from shardwise.spec.strategy_words import configuration_words, shorthand
from shardwise.step.memory_words import show_memory
from shardwise.step.words import percent

_LOWER_MEMORY = 3
_NEVER_FIT = 4


def print_explained(plan: Plan, start: Start, top: int, in_time: Threshold | None = None) -> None:
    """Print every reason, `top` layouts with their settings, tips and lower-memory options.

    `in_time` is the search for the fewest devices that meet a deadline which the plan misses.
    """
    out = screen()
    print_question(out, plan)
    blocks = plan.units.blocks
    if plan.winner is None:
        print_shortfall(out, plan)
        if plan.withheld:
            return
        heading(out, "What would help")
        for tip in plan.tips:
            if not isinstance(tip, OtherParallelism):
                bullet(out, tip.words(blocks))
        paragraph(out, f"{plan.considered:,} configurations priced." + _rejected(plan))
        print_changes(out, plan, plan.ways, brief=False)
        return
    profile = plan.profile(plan.winner)
    print_recommended(out, plan, plan.winner, profile, brief=False)
    heading(out, "Why this layout")
    for reason in (*plan.why, *plan.limits_why):
        if not is_batch(reason):
            bullet(out, reason.words(blocks))
    if plan.size_choice is not None and plan.size_choice.sizes:
        print_sizes(out, plan, plan.size_choice.sizes)
    heading(out, "Layouts compared")
    out.print(terminal_table(layouts_table(plan, top)))
    _print_notes(out, plan, top)
    if plan.tips:
        heading(out, "Options")
        for tip in plan.tips:
            bullet(out, tip.words(blocks))
    _print_lower_memory(out, plan, plan.winner)
    heading(out, "Next")
    if in_time is not None:
        option(out, deadline_words(in_time, plan.problem, plan.budget))
    for line in start_words(start):
        out.print(f"  {line}", soft_wrap=True)


def _print_notes(out: Console, plan: Plan, top: int) -> None:
    """Print notes on the table: unusual settings, ties, the rule of choice, rejected layouts."""
    for note in (
        unusual_words(plan, top),
        too_close_words(plan),
        rule_words(plan) if len(plan.layouts) > 1 and plan.objective != "memory" else "",
        f"{plan.considered:,} configurations priced, {plan.fitting:,} fit." + _rejected(plan),
    ):
        if note:
            paragraph(out, note)


def _rejected(plan: Plan) -> str:
    """Sentence naming the layouts that never fit; empty for none."""
    if not plan.rejected:
        return ""
    listed = [
        f"{shorthand(miss.strategy)} ({show_memory(miss.needed_bytes)})"
        for miss in plan.rejected[:_NEVER_FIT]
    ]
    rest = len(plan.rejected) - _NEVER_FIT
    more = f" and {rest} more" if rest > 0 else ""
    return f" Never fit: {', '.join(listed)}{more}."


def _print_lower_memory(out: Console, plan: Plan, winner: Candidate) -> None:
    """Print configurations that need less memory than the winner, with their speed."""
    if not plan.front:
        return
    aim, fastest = plan.aim, winner.tokens_per_s
    title = "Lower-memory options"
    if isinstance(aim, LeastMemory):
        title += f" (below {percent(aim.share)} of the best throughput, compared with it)"
        fastest = aim.fastest_tokens_per_s
    heading(out, title)
    for candidate in plan.front[:_LOWER_MEMORY]:
        speed = compared_words(candidate.tokens_per_s / fastest - 1)
        what = configuration_words(candidate.strategy, blocks=plan.units.blocks)
        option(out, f"{candidate.needed_bytes / GIB:5.1f} GiB, {speed}: {what}")
