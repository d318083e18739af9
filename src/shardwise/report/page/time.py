"""Where the time of a step goes, as stacked bars: predicted, simulated and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.observe.why.verdict import mean
from shardwise.report.page.bars import Bar, bars
from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject, Traced
from shardwise.spec.quantity import show_seconds
from shardwise.step import StepProfile
from shardwise.timeline.breakdown import breakdown

PARTS = {
    "compute": "compute",
    "optimizer": "optimizer",
    "communication": "exposed communication",
    "copies": "exposed copies",
    "waiting": "waiting for other ranks",
    "idle": "idle",
    "step": "step, not taken apart",
}


def time_section(subjects: Sequence[Subject]) -> Markup | None:
    """Every step whose time is known, by what it was spent on."""
    rows = [bar for subject in subjects for bar in _bars(subject)]
    if not rows:
        return None
    traced = any(s.traced for s in subjects)
    return fragment(
        element(
            "p",
            "One optimizer step. Communication and copies count where nothing computes beside "
            "them; what is hidden costs nothing here.",
        ),
        bars(rows, PARTS, show_seconds, what="One step by what its time went into"),
        element(
            "p",
            "Bars of traces are of the average rank in the profiled steps, which the profiler may "
            "slow; the measured step beside them was not profiled.",
            class_="fine",
        )
        if traced
        else None,
    )


def _bars(subject: Subject) -> Iterator[Bar]:
    if subject.predicted is not None and subject.predicted.time is not None:
        yield _told(subject.name, subject.predicted)
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
        yield _told(subject.name, subject.measured)
    if subject.traced is not None:
        yield _profiled(subject.name, subject.traced)


def _told(name: str, profile: StepProfile) -> Bar:
    time = profile.time
    assert time is not None
    parts = {
        "compute": time.compute_s or 0.0,
        "optimizer": time.optimizer_s or 0.0,
        "communication": time.exposed_communication_s or 0.0,
        "copies": time.exposed_copy_s or 0.0,
    }
    left = time.step_s - sum(parts.values())
    # Where parts are known, what they leave is idle; where none is, the step is whole.
    parts["idle" if time.compute_s is not None else "step"] = left if left > 1e-9 else 0.0
    between = time.step_s_interval or time.step_s_spread
    remark = ""
    if between:
        remark = f"({show_seconds(between[0])} to {show_seconds(between[1])})"
    return Bar(name, profile.provenance.kind, parts, remark)


def _profiled(name: str, traced: Traced) -> Bar:
    ranks = traced.summary.ranks

    def spent(field: str) -> float:
        return mean([rank.per_step(getattr(rank.inside, field)) for rank in ranks]) / 1e9

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
