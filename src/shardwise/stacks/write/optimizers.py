"""The optimizers that each stack can train with."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.spec.optimizer import OPTIMIZERS, TRAINABLE_OPTIMIZERS, Optimizer
from shardwise.spec.optimizer_sharding import (
    Sharding,
    check_sharding,
    check_states,
    is_trained_with,
)
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks import training_arguments
from shardwise.stacks.deepspeed import recipe as of_deepspeed
from shardwise.stacks.write import torchtitan
from shardwise.stacks.write.python import settings as of_script

_OF: dict[str, Collection[str]] = {
    # The user's script creates the optimizer.
    "accelerate": OPTIMIZERS,
    "trainer": training_arguments.OPTIMIZERS,
    "trl": training_arguments.OPTIMIZERS,
    "llama-factory": training_arguments.OPTIMIZERS,
    "axolotl": training_arguments.AXOLOTL_OPTIMIZERS,
    "deepspeed": of_deepspeed.OPTIMIZERS,
    "torchtitan": torchtitan.OPTIMIZERS,
    "megatron-bridge": ("adamw",),
    "lightning": of_script.OPTIMIZERS,
    "python": of_script.OPTIMIZERS,
    "slurm": TRAINABLE_OPTIMIZERS,
    "kubernetes": TRAINABLE_OPTIMIZERS,
}
# Stacks that run `shardwise train`. Others need no check of how optimizer states are sharded.
_OWN_TRAINER = ("slurm", "kubernetes")


def optimizers_of(stack: str) -> tuple[Optimizer, ...]:
    """The optimizers of a run that a stack has."""
    return tuple(name for name in OPTIMIZERS if name in _OF[stack])


def trains(stack: str, optimizer: Optimizer, strategy: Strategy) -> bool:
    """Whether the stack runs the optimizer, which it must have, together with this strategy."""
    return stack not in _OWN_TRAINER or is_trained_with(optimizer, strategy)


def check_strategy(run: RunSpec, stack: str) -> None:
    """Raise SpecError if the stack cannot run the run's optimizer with its strategy."""
    if stack in _OWN_TRAINER:
        check_sharding(run.job.optimizer, Sharding.of(run.strategy))
        check_states(run.job.optimizer, run.strategy)
