"""The three reasons of a plan's screen; `reasons.py` has all of them in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.planning.plan import Plan
from shardwise.planning.reasons import (
    Alternative,
    Compared,
    Divided,
    DoesNotFit,
    LimitedBy,
    OtherParallelism,
    Reason,
    Recomputes,
    ShorterFits,
    SingleDevice,
    StatesFit,
    StepBatch,
)
from shardwise.report.reasons import (
    asked_words,
    decision_words,
    not_fitting_words,
    reason_words,
    relative_words,
    share_words,
)
from shardwise.spec.quantity import show_count
from shardwise.spec.strategy_words import layout_words
from shardwise.step.memory_words import shortfall_words, show_memory
from shardwise.step.words import parallelism_words

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


def brief_words(reason: Reason, blocks: int | None = None) -> str:
    """One reason in one sentence, where its full words take more."""
    brief = _BRIEF.get(type(reason))
    return brief(reason, blocks) if brief else reason_words(reason, blocks)


def _compared(reason: Compared, blocks: int | None) -> str:
    speed = relative_words(reason.throughput, reason.too_close)
    return f"{layout_words(reason.strategy)} is {speed}{decision_words(reason)}."


def _does_not_fit(reason: DoesNotFit, blocks: int | None) -> str:
    return f"{not_fitting_words(reason)}."


def _recomputes(reason: Recomputes, blocks: int | None) -> str:
    cost = f"it takes {share_words(reason.share_of_step)} of the step"
    short = shortfall_words(reason.needed_without_bytes, reason.usable_bytes)
    return f"Without recompute: {short}; {cost}."


def _states_fit(reason: StatesFit, blocks: int | None) -> str:
    return f"No sharding needed: {show_memory(reason.state_bytes)} of model states fit everywhere."


def _alternative(reason: Alternative, blocks: int | None) -> str:
    host = reason.host_bytes
    also = f" and {show_memory(host)} of host memory" if host is not None else ""
    speed, needed = show_count(reason.tokens_per_s), show_memory(reason.needed_bytes)
    return f"{asked_words(reason)}: {speed} tokens/s, needs {needed}{also}."


def _shorter_fits(reason: ShorterFits, blocks: int | None) -> str:
    return f"Sequences of up to {reason.tokens:,} tokens."


def _other_parallelism(reason: OtherParallelism, blocks: int | None) -> str:
    return f"Not considered: {parallelism_words(reason.parallelism)} (not run for this model)."


def _limited_by(reason: LimitedBy, blocks: int | None) -> str:
    """Without the configurations that more memory or bandwidth would allow."""
    return reason_words(replace(reason, with_memory=None, with_network=None), blocks)


def _step_batch(reason: StepBatch, blocks: int | None) -> str:
    """The factors are those of the configuration above it."""
    if reason.asked and reason.tokens != reason.asked:
        return reason_words(reason, blocks)
    devices = reason.data_parallel * reason.inner
    over = f" over {devices:,} devices" if devices > 1 else ""
    return f"Batch: {reason.tokens:,} tokens per step{over}."


_BRIEF: dict[type[Reason], Callable[[Any, int | None], str]] = {
    Alternative: _alternative,
    ShorterFits: _shorter_fits,
    Compared: _compared,
    DoesNotFit: _does_not_fit,
    LimitedBy: _limited_by,
    OtherParallelism: _other_parallelism,
    Recomputes: _recomputes,
    StatesFit: _states_fit,
    StepBatch: _step_batch,
}
