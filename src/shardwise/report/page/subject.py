"""`Subject`: one plan, run or set of traces, with everything known about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwise.planning.plan import Plan
from shardwise.spec.run import RunSpec
from shardwise.step.profile import StepProfile
from shardwise.step.spans import Timeline

if TYPE_CHECKING:
    # Drawing a plan does not import the trace readers.
    from shardwise.observe.analysis import Trace


class Subject(NamedTuple):
    """One plan, run or set of traces. Unknown parts are None or empty."""

    name: str
    # The path on the command line.
    origin: str
    run: RunSpec | None = None
    predicted: StepProfile | None = None
    measured: StepProfile | None = None
    plan: Plan | None = None
    simulated: Timeline | None = None
    traced: Trace | None = None
    # (step, loss) of every logged step.
    losses: Sequence[tuple[int, float]] = ()
    # (step, held-out loss) of every evaluation.
    held_out: Sequence[tuple[int, float]] = ()
    # (step, value) of every logged metric of routing, by its name.
    routing: Mapping[str, Sequence[tuple[int, float]]] = {}
    commands: Sequence[str] = ()
    # Sentences about what is missing, and how to get it.
    notes: Sequence[str] = ()

    @property
    def profiles(self) -> list[StepProfile]:
        """The known profiles: predicted, then measured."""
        return [profile for profile in (self.predicted, self.measured) if profile is not None]

    @property
    def profile(self) -> StepProfile | None:
        """The measured profile, or else the predicted one."""
        return self.measured or self.predicted
