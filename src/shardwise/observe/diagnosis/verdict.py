"""Base of all verdicts on a run: cause, time that fixing it saves, sentences and JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shardwise.step.words import MILLISECOND, percent

OVERLAPPING = "Savings overlap; do not add them."


class Health(NamedTuple):
    """Step time, compute share, idle time and overlap per step, means over ranks.

    `overlap` is the share of communication that compute hides; None without communication.
    """

    # Number of marked steps; 0 if none is marked, then the full trace counts as one step.
    steps: int
    step_ns: float
    compute: float
    idle_ns: float
    overlap: float | None
    healthy: bool

    @property
    def period(self) -> str:
        """What times of verdicts refer to: "per step", or "in the trace" if no step is marked."""
        return "per step" if self.steps else "in the trace"

    def words(self) -> str:
        """Sentence on a run without verdicts: whether it is healthy, and its compute share."""
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
    """A cause of lost time, with a stable key.

    `saves_ns` is what fixing it saves per step, mean over ranks; per trace where no step is marked.
    All times, calls and gathers of verdicts are per step in this sense. `last_to_arrive` counts
    collectives, out of the `collectives` of the full trace in which a rank waited.
    """

    cause: str
    saves_ns: float

    @property
    @abstractmethod
    def title(self) -> str:
        """The cause as a noun phrase."""

    @abstractmethod
    def evidence(self, period: str) -> str:
        """Sentence on what was measured, without a full stop; `period` is "per step" or similar."""

    @property
    @abstractmethod
    def fix(self) -> str:
        """What to change, as a sentence without a full stop."""

    def result(self, health: Health) -> str:
        """Sentence: the cause, the time it costs, and its share of a step."""
        lost = f"{duration(self.saves_ns)} {health.period}"
        return f"{self.title}: {lost} ({percent(self.share(health))})."

    def share(self, health: Health) -> float:
        """The time that fixing it saves, as a share of a step."""
        return self.saves_ns / health.step_ns if health.step_ns else 0.0

    def explain(self, health: Health) -> Explanation:
        """The verdict in words; `health` gives the step time."""
        evidence = f"{self.evidence(health.period)}."
        return Explanation(self.title, self.result(health), evidence, f"{self.fix}.")

    def to_dict(self, health: Health) -> dict[str, Any]:
        """The verdict as `--json` prints it."""
        words = self.explain(health)
        return {
            **asdict(self),
            "share": self.share(health),
            "text": {"result": words.result, "evidence": words.evidence, "fix": words.fix},
        }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def duration(nanoseconds: float) -> str:
    """Nanoseconds as text in milliseconds with about three digits: `12.3 ms`."""
    value = nanoseconds / MILLISECOND
    digits = 0 if value >= 99.95 else 1 if value >= 0.95 else 3 if value >= 0.0005 else 0
    return f"{value:,.{digits}f} ms"


def listed(texts: Sequence[str]) -> str:
    """Texts joined as in a sentence: `5`, `0 and 6`, `0, 3 and 6`."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def count(number: float) -> str:
    """A number of things as text, with at most one decimal: `7`, `81.5`, `1,200`."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def plural(number: float, noun: str) -> str:
    """A number and a noun, in the plural unless it is 1: `1 call`, `1,200 calls`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
