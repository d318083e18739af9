"""Which optimizers the trainer can use with a strategy: its sharding, states and offload."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.spec.optimizer import LOW_BIT, ON_HOST, Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

# Optimizers that update full matrices, so parameters cannot be sharded. torch 2.13's Adafactor
# fails on DTensors; its Muon runs on DTensors with more than ten collectives per matrix and step.
REPLICATED: tuple[Optimizer, ...] = ("adafactor", "muon")
# An alternative with small states that can be sharded.
INSTEAD: Optimizer = "adamw-8bit"
# Optimizers whose blocks of states do not fit the shards of tensor parallelism.
WITHOUT_TENSOR: tuple[Optimizer, ...] = tuple(LOW_BIT)
# Optimizers whose updates torchao can round stochastically.
STOCHASTIC: tuple[Optimizer, ...] = ("adamw", "adam", *LOW_BIT)


class Sharding(NamedTuple):
    """How the parameters that an optimizer updates are divided among devices."""

    # Whether by `fully_shard`, as in every zero kind.
    sharded: bool
    # Whether by tensor parallelism.
    tensor: bool

    @classmethod
    def of(cls, strategy: Strategy) -> Sharding:
        """The sharding that a strategy gives parameters."""
        return cls(strategy.sharded, strategy.tensor > 1)


def is_trained_with(optimizer: Optimizer, strategy: Strategy) -> bool:
    """Whether the trainer can use this optimizer with this strategy."""
    sharding = Sharding.of(strategy)
    return not (_refusal(optimizer, sharding) or _refusal_of_states(optimizer, strategy))


def check_states(optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise SpecError if the trainer cannot use this optimizer with these states and offload."""
    refusal = _refusal_of_states(optimizer, strategy)
    if refusal is not None:
        raise SpecError(f"job.optimizer: {optimizer} {refusal}")


def _refusal_of_states(optimizer: Optimizer, strategy: Strategy) -> str | None:
    """Why the trainer cannot use an optimizer with states and offload; None if it can."""
    if strategy.states is not None and optimizer not in STOCHASTIC:
        return f"has no stochastic rounding; use {', '.join(STOCHASTIC[:-1])} or {STOCHASTIC[-1]}"
    if strategy.offloads("optimizer") and optimizer not in ON_HOST:
        return f"does not run on a host; use {', '.join(ON_HOST)}, or leave the optimizer in place"
    return None


def check_sharding(optimizer: Optimizer, sharding: Sharding) -> None:
    """Raise SpecError if the trainer cannot use this optimizer with this sharding."""
    refusal = _refusal(optimizer, sharding)
    if refusal is not None:
        raise SpecError(f"job.optimizer: {optimizer} {refusal}")


def _refusal(optimizer: Optimizer, sharding: Sharding) -> str | None:
    """Why the trainer cannot use an optimizer with a sharding; None if it can."""
    if optimizer in REPLICATED and any(sharding):
        return (
            "needs whole matrices, and this strategy divides them; use strategy ddp, or "
            f"{INSTEAD}, whose states are small too"
        )
    if optimizer in WITHOUT_TENSOR and sharding.tensor:
        return "does not run with tensor parallelism, whose shards its blocks do not fit; use adamw"
    return None
