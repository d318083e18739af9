"""What a page is about: plans, runs and traces, each with whatever is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.observe.diagnosis.verdict import Verdict
from shardwise.observe.diagnosis.verdicts import Health
from shardwise.observe.summary import Summary
from shardwise.planning.plan import Plan
from shardwise.spec.run import RunSpec
from shardwise.step import StepProfile
from shardwise.timeline.spans import Timeline


class Traced(NamedTuple):
    """Traces of a run, read: ranks with their timelines, and why it was slow."""

    summary: Summary
    health: Health
    verdicts: list[Verdict]
    # Of the average rank and step: exposed communication that was waiting for other ranks; None
    # where ranks could not be joined.
    waiting_ns: float | None


class Subject(NamedTuple):
    """One plan, run or set of traces. What is not known of it is None or empty."""

    name: str
    # What was named on the command line.
    origin: str
    run: RunSpec | None = None
    predicted: StepProfile | None = None
    measured: StepProfile | None = None
    plan: Plan | None = None
    simulated: Timeline | None = None
    traced: Traced | None = None
    # Every logged step: its number and its loss.
    losses: Sequence[tuple[int, float]] = ()
    commands: Sequence[str] = ()
    # Sentences about what could not be told, and how it could.
    notes: Sequence[str] = ()

    @property
    def profiles(self) -> list[StepProfile]:
        return [profile for profile in (self.predicted, self.measured) if profile is not None]

    @property
    def profile(self) -> StepProfile | None:
        """What describes it: measured where it was."""
        return self.measured or self.predicted
