"""Why a step does not fit: its largest memory term, and memory that more devices cannot reduce."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.spec.families import DIVISIBLE
from shardwise.spec.lookup import Model
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import StepProfile

# Terms that shrink with more devices; all others are the same on any number of devices.
SHRINKING_TERMS = ("parameters", "gradients", "optimizer")


class Shortfall(NamedTuple):
    """Why a step does not fit."""

    largest_term: str
    largest_bytes: int
    # Bytes per device that no number of devices reduces; None if these alone fit.
    unshrinking_bytes: int | None
    # Whether ZeRO-1 or ZeRO-2 keeps all parameters gathered and these alone do not fit.
    keeps_all_gathered: bool


Parallelism = Literal["expert", "tensor", "pipeline"]


def other_parallelism(model: Model) -> tuple[Parallelism, ...]:
    """Kinds of parallelism that would reduce memory but that shardwise does not run for this model.

    The most useful first.
    """
    if getattr(model, "experts", None) is not None:
        return ("pipeline",)
    divisible = getattr(model, "family", None) in DIVISIBLE and model.adapter is None
    return ("pipeline",) if divisible else ("tensor", "pipeline")


def shortfall_of(profile: StepProfile, strategy: Strategy) -> Shortfall:
    """The largest memory term of a step that does not fit, and what more devices cannot reduce."""
    memory = profile.known_memory
    usable = memory.usable_bytes or 0
    largest = max(memory.terms, key=lambda term: memory.terms[term])
    fixed = sum(size for term, size in memory.terms.items() if term not in SHRINKING_TERMS)
    keeps = strategy.kind in ("zero1", "zero2")
    return Shortfall(
        largest_term=largest,
        largest_bytes=memory.terms[largest],
        unshrinking_bytes=fixed if strategy.sharded and fixed > usable else None,
        keeps_all_gathered=keeps and memory.terms["unsharded_parameters"] > usable,
    )
