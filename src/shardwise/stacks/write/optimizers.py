"""The optimizers that each stack trains with: asked by plans for a stack, and by its export."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.spec.optimizer import OPTIMIZERS, TRAINED, Optimizer
from shardwise.stacks.read import deepspeed
from shardwise.stacks.write import arguments, axolotl, torchtitan
from shardwise.stacks.write.python import step

_OF: dict[str, Collection[str]] = {
    # The user's script makes it.
    "accelerate": OPTIMIZERS,
    "trainer": arguments.OPTIMIZERS,
    "trl": arguments.OPTIMIZERS,
    "llama-factory": arguments.OPTIMIZERS,
    "axolotl": axolotl.OPTIMIZERS,
    "deepspeed": deepspeed.OPTIMIZERS,
    "torchtitan": torchtitan.OPTIMIZERS,
    "megatron-bridge": ("adamw",),
    "lightning": step.OPTIMIZERS,
    "python": step.OPTIMIZERS,
    # Both start `shardwise train`.
    "slurm": TRAINED,
    "kubernetes": TRAINED,
}


def optimizers_of(stack: str) -> tuple[Optimizer, ...]:
    """The optimizers of a run that a stack trains with unchanged."""
    return tuple(name for name in OPTIMIZERS if name in _OF[stack])
