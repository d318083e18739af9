"""Why a step does not fit: what takes the memory, and what no number of devices would change."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.spec.families import DIVISIBLE
from shardwise.spec.lookup import Model
from shardwise.spec.strategy import Strategy
from shardwise.step import StepProfile

# These shrink as more devices share them; all others are the same on any number of devices.
SHRINKING = ("parameters", "gradients", "optimizer")


class Shortfall(NamedTuple):
    """Why a step does not fit."""

    largest_term: str
    largest_bytes: int
    # What stays on each device however many there are, where that alone is too much.
    unshrinking_bytes: int | None
    # ZeRO-1 and ZeRO-2 keep all parameters gathered, where those alone are too much.
    keeps_all_gathered: bool


Parallelism = Literal["expert", "tensor", "pipeline"]


def other_parallelism(model: Model) -> tuple[Parallelism, ...]:
    """Parallelism that reduces memory per device and that shardwise does not run for this model.

    The most useful first: experts hold most of a mixture's parameters.
    """
    if getattr(model, "experts", None) is not None:
        return ("expert", "pipeline")
    divisible = getattr(model, "family", None) in DIVISIBLE and model.adapter is None
    return ("pipeline",) if divisible else ("tensor", "pipeline")


def shortfall_of(profile: StepProfile, strategy: Strategy) -> Shortfall:
    """The largest term of a step that does not fit, and what no number of devices would change."""
    memory = profile.known_memory
    usable = memory.usable_bytes or 0
    largest = max(memory.terms, key=lambda term: memory.terms[term])
    fixed = sum(size for term, size in memory.terms.items() if term not in SHRINKING)
    keeps = strategy.kind in ("zero1", "zero2")
    return Shortfall(
        largest_term=largest,
        largest_bytes=memory.terms[largest],
        unshrinking_bytes=fixed if strategy.sharded and fixed > usable else None,
        keeps_all_gathered=keeps and memory.terms["unsharded_parameters"] > usable,
    )
