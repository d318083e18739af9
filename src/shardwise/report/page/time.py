"""Stacked bars of the step time by part: predicted, simulated and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.observe.diagnosis.verdict import mean
from shardwise.report.page.bars import Bar, bars
from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject
from shardwise.spec.quantity import show_seconds
from shardwise.step.breakdown import breakdown
from shardwise.step.profile import StepProfile

if TYPE_CHECKING:
    from shardwise.observe.analysis import Trace

PARTS = {
    "compute": "compute",
    "optimizer": "optimizer",
    "communication": "exposed communication",
    "copies": "exposed copies",
    "waiting": "waiting for other ranks",
    "idle": "idle",
    "step": "step (no breakdown)",
}


def time_section(subjects: Sequence[Subject]) -> Markup | None:
    """One bar per known step, in seconds, divided into its parts; None without any."""
    rows = [bar for subject in subjects for bar in _bars(subject)]
    if not rows:
        return None
    traced = any(s.traced for s in subjects)
    return fragment(
        element(
            "p",
            "One optimizer step. Only exposed communication and copies are shown: what compute "
            "hides costs no time.",
        ),
        bars(rows, PARTS, show_seconds, what="Time of one step by part"),
        element(
            "p",
            "Bars of traces show the average rank in the profiled steps, which the profiler may "
            "slow down; the other measured steps were not profiled.",
            class_="fine",
        )
        if traced
        else None,
    )


def _bars(subject: Subject) -> Iterator[Bar]:
    """The bars of a subject: predicted, simulated, measured and profiled, as far as known."""
    if subject.predicted is not None and subject.predicted.time is not None:
        yield _profile_bar(subject.name, subject.predicted)
    if subject.simulated is not None and subject.traced is not None:
        parts = breakdown(subject.simulated)
        yield Bar(
            subject.name,
            "simulated",
            {
                "compute": parts.compute_ns / 1e9,
                "communication": parts.exposed_communication_ns / 1e9,
                "copies": parts.exposed_copy_ns / 1e9,
                "idle": parts.idle_ns / 1e9,
            },
        )
    if subject.measured is not None and subject.measured.time is not None:
        yield _profile_bar(subject.name, subject.measured)
    if subject.traced is not None:
        yield _profiled(subject.name, subject.traced)


def _profile_bar(name: str, profile: StepProfile) -> Bar:
    """Bar of a predicted or measured step, in seconds."""
    time = profile.time
    assert time is not None
    parts = {
        "compute": time.compute_s or 0.0,
        "optimizer": time.optimizer_s or 0.0,
        "communication": time.exposed_communication_s or 0.0,
        "copies": time.exposed_copy_s or 0.0,
    }
    left = time.step_s - sum(parts.values())
    # The rest is idle time if parts are known; otherwise the step has no breakdown.
    parts["idle" if time.compute_s is not None else "step"] = left if left > 1e-9 else 0.0
    between = time.step_s_interval or time.step_s_spread
    remark = ""
    if between:
        low, high = (show_seconds(value) for value in between)
        remark = f"({low} to {high})" if low != high else ""
    return Bar(name, profile.provenance.kind, parts, remark)


def _profiled(name: str, traced: Trace) -> Bar:
    """Bar of the profiled steps, in seconds per step, averaged over ranks."""
    ranks = traced.summary.ranks

    def spent(field: str) -> float:
        return mean([rank.per_step(getattr(rank.profiled, field)) for rank in ranks]) / 1e9

    exposed = spent("exposed_communication_ns")
    waiting = min(exposed, (traced.waiting_ns or 0.0) / 1e9)
    return Bar(
        f"{name}, profiled",
        "measured",
        {
            "compute": spent("compute_ns"),
            "communication": exposed - waiting,
            "copies": spent("exposed_copy_ns"),
            "waiting": waiting,
            "idle": spent("idle_ns"),
        },
        f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}",
    )
