"""Sentences about a plan, for screens and pages."""

from __future__ import annotations

from shardwise.planning.choice import WANTED_HEADROOM
from shardwise.planning.plan import Plan
from shardwise.planning.reasons.layout import (
    Compared,
    Divided,
    DoesNotFit,
    SingleDevice,
    StatesFit,
)
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.reasons.settings import Recomputes, StepBatch
from shardwise.planning.rows import Candidate
from shardwise.spec.quantity import show_count, show_seconds
from shardwise.spec.strategy import Strategy
from shardwise.spec.strategy_words import configuration_words
from shardwise.step.memory_words import AT_RISK, shortfall_words
from shardwise.step.words import comparison_words, percent, span


def step_words(plan: Plan, winner: Candidate) -> str:
    """Time and throughput of a step."""
    all_devices = (
        f", {show_count(winner.tokens_per_s)} in all" if winner.strategy.devices > 1 else ""
    )
    return f"{pace_words(plan, winner)}{all_devices}, MFU {percent(plan.mfu(winner))}."


def pace_words(plan: Plan, winner: Candidate) -> str:
    """Time of a step with its interval, and throughput per device."""
    low, high = plan.interval
    between = span(winner.step_s * (1 + low), winner.step_s * (1 + high), show_seconds)
    per_device = winner.tokens_per_s / plan.problem.cluster.devices
    return (
        f"{show_seconds(winner.step_s)} (90% interval {between}), {per_device:,.0f} tokens/s per "
        "device"
    )


def planned_words(plan: Plan, strategy: Strategy) -> str:
    """A configuration of this plan."""
    seq_len, blocks = plan.problem.job.seq_len, plan.units.blocks
    return configuration_words(strategy, seq_len=seq_len, blocks=blocks)


def ranked(plan: Plan, top: int) -> list[Candidate]:
    """The winner, then the best of the other layouts."""
    if plan.winner is None:
        return []
    others = [c for c in plan.layouts if c.layout != plan.winner.layout]
    return [plan.winner, *others][:top]


def alike_words(plan: Plan) -> str:
    """How many layouts are too close to call with the recommended one; empty for none."""
    alike = plan.too_close_to_call()
    if not alike:
        return ""
    within = comparison_words(plan.comparison_error)
    return f"Too close to call ({within}): {_others(plan, alike, ' layout')}."


def decided_words(plan: Plan) -> str:
    """The same in a line, with what decides among equals."""
    alike = plan.too_close_to_call()
    if not alike:
        return ""
    told = f"Too close to call (within {percent(plan.comparison_error, 1)}): {_others(plan, alike)}"
    # Where the least memory or money was asked for, that decided first.
    first = plan.objective in ("memory", "money")
    rule = "" if first else "; headroom decides, then simplicity"
    return f"{told}{rule}."


def _others(plan: Plan, count: int, of: str = "") -> str:
    """So many others, on the size that was chosen where there were several."""
    where = f" on {plan.problem.cluster.devices:,} devices" if plan.size_choice else ""
    return f"{count:,} other{of}{'s' if count > 1 else ''}{where}"


def none_fits_words(plan: Plan) -> str:
    """That none fits; or only at risk, as an estimate would say of it."""
    return f"No configuration fits{' safely' if plan.at_risk else ''}."


def nearest_words(plan: Plan) -> str:
    """The closest configuration where none fits, and what its verdict means."""
    nearest = plan.rejected[0]
    short = shortfall_words(nearest.needed_bytes, plan.limit_bytes)
    named = f"Closest: {planned_words(plan, nearest.strategy)}"
    if nearest.verdict(plan.problem.cluster.device) == "at risk":
        return f"{named}, at risk: {short}. {AT_RISK}"
    return f"{named} ({short})."


def rule_words(plan: Plan) -> str:
    """The rule that chose."""
    asked = plan.problem.job.global_batch is not None
    return (
        f"Rule: speeds {comparison_words(plan.comparison_error)}, are equal; among equals "
        f"{'the batch asked for, then ' if asked else ''}more headroom (up to "
        f"{percent(WANTED_HEADROOM)} of usable memory), then the simpler."
    )


# What says most about a layout comes first.
_LAYOUT = (Divided, SingleDevice, StatesFit, DoesNotFit, Compared)


def three_reasons(plan: Plan) -> list[Reason]:
    """Why this layout, what was weighed against it or what its memory costs, and its limit."""
    why = [reason for reason in plan.why if not isinstance(reason, StepBatch)]
    layout = next((r for kind in _LAYOUT for r in why if isinstance(r, kind)), None)
    # A faster layout that was not chosen is what a reader of the table asks for first.
    second = sorted((r for r in why if r is not layout), key=_weight)
    chosen = [*([layout] if layout else []), *second[:1], *plan.limits_why[:1]]
    return [reason for reason in (*why, *plan.limits_why) if any(reason is one for one in chosen)]


def _weight(reason: Reason) -> int:
    if isinstance(reason, Compared):
        return 0 if reason.decided_by is not None else 2
    return 1 if isinstance(reason, Recomputes) else 3
