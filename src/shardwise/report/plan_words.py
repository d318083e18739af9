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
from shardwise.step.words import comparison_words, percent, range_text


def step_words(plan: Plan, winner: Candidate) -> str:
    """Step time with its interval, tokens/s per device and in total, and MFU, as text."""
    all_devices = (
        f", {show_count(winner.tokens_per_s)} in all" if winner.strategy.devices > 1 else ""
    )
    return f"{pace_words(plan, winner)}{all_devices}, MFU {percent(plan.mfu(winner))}."


def pace_words(plan: Plan, winner: Candidate) -> str:
    """Step time with its 90 % interval, and tokens/s per device, as text."""
    low, high = plan.interval
    between = range_text(winner.step_s * (1 + low), winner.step_s * (1 + high), show_seconds)
    per_device = winner.tokens_per_s / plan.problem.cluster.devices
    return (
        f"{show_seconds(winner.step_s)} (90% interval {between}), {per_device:,.0f} tokens/s per "
        "device"
    )


def planned_words(plan: Plan, strategy: Strategy) -> str:
    """The settings of a configuration in one line, for the job and model of this plan."""
    seq_len, blocks = plan.problem.job.seq_len, plan.units.blocks
    return configuration_words(strategy, seq_len=seq_len, blocks=blocks)


def ranked_layouts(plan: Plan, top: int) -> list[Candidate]:
    """The winner, then the best of each other layout; at most `top`, empty without a winner."""
    if plan.winner is None:
        return []
    others = [c for c in plan.layouts if c.layout != plan.winner.layout]
    return [plan.winner, *others][:top]


def is_unchanged(plan: Plan) -> bool:
    """Whether the winner is the configuration that the file asks about."""
    now = next((b for b in plan.baselines if b.name == "now"), None)
    return now is not None and plan.winner is not None and now.strategy == plan.winner.strategy


def too_close_words(plan: Plan) -> str:
    """Sentence: how many layouts are too close to call with the winner; empty for none."""
    alike = plan.too_close_to_call()
    if not alike:
        return ""
    within = comparison_words(plan.comparison_error)
    return f"Too close to call ({within}): {_other_layouts(plan, alike, ' layout')}."


def tie_break_words(plan: Plan) -> str:
    """Sentence: how many layouts are too close to call, and the tie-breaker; empty for none."""
    alike = plan.too_close_to_call()
    if not alike:
        return ""
    others = _other_layouts(plan, alike)
    told = f"Too close to call (within {percent(plan.comparison_error, 1)}): {others}"
    # Where the least memory or money was asked for, that decided first.
    first = plan.objective in ("memory", "money")
    rule = "" if first else "; headroom decides, then simplicity"
    return f"{told}{rule}."


def _other_layouts(plan: Plan, count: int, of: str = "") -> str:
    """Such as "3 other layouts on 64 devices"; the devices only if the plan chose their number."""
    where = f" on {plan.problem.cluster.devices:,} devices" if plan.size_choice else ""
    return f"{count:,} other{of}{'s' if count > 1 else ''}{where}"


def none_fits_words(plan: Plan) -> str:
    """Sentence: no configuration fits, or none fits safely."""
    return f"No configuration fits{' safely' if plan.at_risk else ''}."


def nearest_words(plan: Plan) -> str:
    """Sentence: the closest configuration that does not fit, and how much memory it needs."""
    nearest = plan.rejected[0]
    short = shortfall_words(nearest.needed_bytes, plan.limit_bytes)
    named = f"Closest: {planned_words(plan, nearest.strategy)}"
    if nearest.verdict(plan.problem.cluster.device) == "at risk":
        return f"{named}, at risk: {short}. {AT_RISK}"
    return f"{named} ({short})."


def rule_words(plan: Plan) -> str:
    """Sentence: the rule that chose the winner."""
    asked = plan.problem.job.global_batch is not None
    return (
        f"Rule: speeds {comparison_words(plan.comparison_error)}, are equal; among equals "
        f"{'the batch asked for, then ' if asked else ''}more headroom (up to "
        f"{percent(WANTED_HEADROOM)} of usable memory), then the simpler."
    )


# Reasons for the layout, the most informative kind first.
_LAYOUT = (Divided, SingleDevice, StatesFit, DoesNotFit, Compared)


def three_reasons(plan: Plan) -> list[Reason]:
    """At most three reasons: why this layout, its trade-off or memory cost, and its limit."""
    why = [reason for reason in plan.why if not isinstance(reason, StepBatch)]
    layout = next((r for kind in _LAYOUT for r in why if isinstance(r, kind)), None)
    # A reader of the table first asks why a faster layout was not chosen.
    second = sorted((r for r in why if r is not layout), key=_reason_order)
    chosen = [*([layout] if layout else []), *second[:1], *plan.limits_why[:1]]
    return [reason for reason in (*why, *plan.limits_why) if any(reason is one for one in chosen)]


def _reason_order(reason: Reason) -> int:
    """Sort key of the second reason: 0 is the most important."""
    if isinstance(reason, Compared):
        return 0 if reason.decided_by is not None else 2
    return 1 if isinstance(reason, Recomputes) else 3
