"""What every verdict on a run has: its cause, what it costs, its words and its JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shardwise.step.words import MILLISECOND, percent

OVERLAPPING = "Savings overlap; do not add them."


class Health(NamedTuple):
    """One step of the average rank: its length, and shares of it."""

    # Number of marked steps; 0 where the full trace stands for one step.
    steps: int
    step_ns: float
    compute: float
    idle_ns: float
    overlap: float | None
    healthy: bool

    @property
    def period(self) -> str:
        """What times of verdicts are per."""
        return "per step" if self.steps else "in the trace"

    def words(self) -> str:
        """The result where no verdict stands out."""
        share = percent(self.compute, 1)
        if self.healthy:
            return f"Healthy: compute takes {share} of the time."
        return f"No dominant cause: compute takes {share} of the time."


class Explanation(NamedTuple):
    """A verdict in words. `title` is a noun phrase, the others are complete sentences."""

    title: str
    result: str
    evidence: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Verdict(ABC):
    """A cause of lost time, by a stable key.

    `saves_ns` is what fixing it saves per step, on the average rank; per trace where no step is
    marked. All times, calls and gathers of verdicts are per step in this sense. `last_to_arrive`
    counts among the `collectives` of the full trace in which a rank waited.
    """

    cause: str
    saves_ns: float

    @property
    @abstractmethod
    def title(self) -> str:
        """The cause as a noun phrase."""

    @abstractmethod
    def evidence(self, period: str) -> str:
        """What was measured, without a full stop; `period` is what times are per."""

    @property
    @abstractmethod
    def fix(self) -> str:
        """What to change, without a full stop."""

    def result(self, health: Health) -> str:
        """The cause and what it costs."""
        lost = f"{duration(self.saves_ns)} {health.period}"
        return f"{self.title}: {lost} ({percent(self.share(health))})."

    def share(self, health: Health) -> float:
        """The part of a step that it costs."""
        return self.saves_ns / health.step_ns if health.step_ns else 0.0

    def explain(self, health: Health) -> Explanation:
        """The verdict in words; `health` tells the length of a step."""
        evidence = f"{self.evidence(health.period)}."
        return Explanation(self.title, self.result(health), evidence, f"{self.fix}.")

    def to_dict(self, health: Health) -> dict[str, Any]:
        """The verdict as `--json` prints it."""
        words = self.explain(health)
        return {
            **asdict(self),
            "share": self.saves_ns / health.step_ns,
            "text": {"result": words.result, "evidence": words.evidence, "fix": words.fix},
        }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def duration(nanoseconds: float) -> str:
    """Milliseconds with a unit and about three digits."""
    value = nanoseconds / MILLISECOND
    digits = 0 if value >= 99.95 else 1 if value >= 0.95 else 3 if value >= 0.0005 else 0
    return f"{value:,.{digits}f} ms"


def listed(texts: Sequence[str]) -> str:
    """`5`, `0 and 6`, `0, 3 and 6`."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def count(number: float) -> str:
    """`7`, `81.5`, `1,200`: an average number of things."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def plural(number: float, noun: str) -> str:
    """`1 call`, `1,200 calls`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
