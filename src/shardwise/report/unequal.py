"""The screen of `shardwise plan` for a cluster of unequal parts."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardwise.planning.unequal import Alone, Choice, UnequalPlan
from shardwise.predict.rates import comparison_error
from shardwise.report.parts import parts_table
from shardwise.report.screen import bullet, heading, option, paragraph, screen
from shardwise.spec.quantity import show_count, show_seconds
from shardwise.spec.strategy_words import configuration_words
from shardwise.step.words import percent


def print_unequal_plan(plan: UnequalPlan, command: str, written: str | None) -> None:
    """Print what each part does, equal shares, each part alone, and `command`, which starts it."""
    out, run = screen(), plan.run
    out.print(Text(run.model.name, style="bold") + Text(f" on {run.cluster}, predicted"))
    profile = plan.profile
    if plan.winner is None or profile is None or profile.parts is None:
        paragraph(out, refusal_words(plan))
        _print_compared(out, plan)
        return
    words = configuration_words(plan.winner.strategy, seq_len=run.job.seq_len)
    paragraph(out, f"Recommended: {words}")
    paragraph(
        out,
        f"Step: {show_seconds(plan.winner.step_s)} of {plan.winner.tokens:,} tokens, "
        f"{show_count(plan.winner.tokens_per_s)} tokens/s in all.",
    )
    out.print()
    out.print(parts_table(profile.parts))
    _print_compared(out, plan)
    heading(out, "Next")
    if written is None:
        option(out, "add -o run.toml to write the run")
    option(out, command)


def refusal_words(plan: UnequalPlan) -> str:
    """Why the parts do not train together, and what to do instead."""
    alone = plan.fastest_alone
    if alone is None or alone.best is None:
        return (
            "No configuration fits: every part needs room for the model, whatever its share; use "
            "devices with more memory, or a shorter sequence."
        )
    others = " and ".join(str(one.part) for one in plan.alone if one is not alone)
    use = f"use {alone.part} alone: --cluster {alone.part}"
    if plan.gain is None:
        return f"No configuration fits all parts; {use}."
    if plan.gain <= 0:
        return f"Does not pay: {others} would make training {-plan.gain:.0%} slower; {use}."
    return (
        f"Does not pay: {others} would add {plan.gain:.1%}, which is within the error of "
        f"comparison ({percent(comparison_error())}); {use}."
    )


def _print_compared(out: Console, plan: UnequalPlan) -> None:
    """Print the best with equal shares, and each part alone, relative to the best."""
    heading(out, "Compared with")
    best = plan.best
    if plan.equal is not None and best is not None:
        bullet(out, f"equal shares: {_compared(plan.equal, best)}")
    for one in plan.alone:
        bullet(out, f"{one.part} alone: {_alone(one, best)}")


def _alone(one: Alone, best: Choice | None) -> str:
    return "does not fit" if one.best is None else _compared(one.best, best)


def _compared(choice: Choice, best: Choice | None) -> str:
    """Throughput of a choice, and relative to the best."""
    told = f"{show_count(choice.tokens_per_s)} tokens/s"
    if best is None or best is choice:
        return told
    return f"{told}, {choice.tokens_per_s / best.tokens_per_s:.0%} of the best together"
