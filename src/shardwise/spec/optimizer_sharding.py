"""Which optimizers of the trainer update parameters that are sharded or divided."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.spec.optimizer import LOW_BIT, Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

# Their updates need whole matrices. torch 2.13's Adafactor fails on DTensors; its Muon runs on
# them, with more than ten collectives for every matrix and step.
REPLICATED: tuple[Optimizer, ...] = ("adafactor", "muon")
# Small states that can be sharded.
INSTEAD: Optimizer = "adamw-8bit"
# The blocks of their states do not fit the shards of tensor parallelism.
WITHOUT_TENSOR: tuple[Optimizer, ...] = tuple(LOW_BIT)


class Sharding(NamedTuple):
    """How the parameters that an optimizer updates are spread over devices."""

    # By `fully_shard`, as of every zero kind.
    sharded: bool
    # By tensor parallelism.
    tensor: bool

    @classmethod
    def of(cls, strategy: Strategy) -> Sharding:
        """The sharding that a strategy gives parameters."""
        return cls(strategy.sharded, strategy.tensor > 1)


def is_trained_with(optimizer: Optimizer, strategy: Strategy) -> bool:
    """Whether the trainer updates parameters with this optimizer under this strategy."""
    return _refusal(optimizer, Sharding.of(strategy)) is None


def check_sharding(optimizer: Optimizer, sharding: Sharding) -> None:
    """Raise SpecError for parameters that the trainer does not update with this optimizer."""
    refusal = _refusal(optimizer, sharding)
    if refusal is not None:
        raise SpecError(f"job.optimizer: {optimizer} {refusal}")


def _refusal(optimizer: Optimizer, sharding: Sharding) -> str | None:
    if optimizer in REPLICATED and any(sharding):
        return (
            "needs whole matrices, and this strategy divides them; use strategy ddp, or "
            f"{INSTEAD}, whose states are small too"
        )
    if optimizer in WITHOUT_TENSOR and sharding.tensor:
        return "does not run with tensor parallelism, whose shards its blocks do not fit; use adamw"
    return None
