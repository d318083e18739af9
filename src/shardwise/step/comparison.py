"""`compare`: StepProfiles side by side, predicted or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.spec.record import SpecError
from shardwise.step.notebook import html_of
from shardwise.step.profile import StepProfile
from shardwise.step.words import strategy_words


@dataclass(frozen=True)
class Comparison:
    """Profiles under their names, in the order given. Notebooks display them as bars."""

    profiles: tuple[StepProfile, ...]
    names: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The profiles by name, each as `--json` prints it."""
        return {n: p.to_dict() for n, p in zip(self.names, self.profiles, strict=True)}

    def __repr__(self) -> str:
        lines = [f"  {n}: {p!r}" for n, p in zip(self.names, self.profiles, strict=True)]
        return "\n".join([f"Comparison of {len(lines)} profiles", *lines])

    def _repr_html_(self) -> str:
        return html_of(self)


def compare(*profiles: StepProfile, names: Sequence[str] = ()) -> Comparison:
    """Put StepProfiles side by side: configurations, or a prediction and its measurement.

    One predicted and one measured profile are compared term by term, with the prediction error.

    Args:
        profiles: What `estimate` returned, or a run's prediction and measurement.
        names: One name per profile; by default strategy and kind, such as "zero3 predicted".

    Raises:
        SpecError: There are fewer than two profiles, or not one name for each.

    Examples:
        >>> kinds = ("zero2", "zero3")
        >>> profiles = [shardwise.estimate("llama-3-8b", "8xH100-SXM", kind) for kind in kinds]
        >>> shardwise.compare(*profiles, names=kinds)
    """
    problems = []
    if len(profiles) < 2:
        problems.append(f"compare: needs at least two profiles, got {len(profiles)}")
    if names and len(names) != len(profiles):
        problems.append(f"compare: {len(names)} names for {len(profiles)} profiles; give one each")
    if problems:
        raise SpecError(problems)
    return Comparison(profiles, tuple(names) or _names(profiles))


def _names(profiles: Sequence[StepProfile]) -> tuple[str, ...]:
    """Strategies; numbered where two profiles would get the same name."""
    plain = [f"{strategy_words(p)} {p.provenance.kind}" for p in profiles]
    if len(set(plain)) == len(plain):
        return tuple(plain)
    return tuple(f"{number}: {name}" for number, name in enumerate(plain, start=1))
