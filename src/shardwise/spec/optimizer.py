"""The optimizers by name, and formulas for the bytes of their states."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

Optimizer = Literal[
    "adamw",
    "adam",
    "adamw-8bit",
    "adamw-4bit",
    "adamw-fp8",
    "adafactor",
    "muon",
    "sgd",
    "momentum",
    "lion",
]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
# torch has no Lion: it is planned only.
TRAINABLE_OPTIMIZERS: tuple[Optimizer, ...] = tuple(name for name in OPTIMIZERS if name != "lion")

# Number of states per parameter, for optimizers whose states all have its dtype and shape.
_STATE_TENSORS: dict[Optimizer, int] = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0}
# Elements below which torchao, like bitsandbytes, does not quantise a tensor's states.
LEAST_QUANTISED = 4096
_FP32 = 4


class LowBit(NamedTuple):
    """How torchao stores both moments of AdamW: codes, and one fp32 scale per block."""

    bits: int
    block: int
    # fp32 values in the table of codes, of which each moment of each parameter has one.
    table: int = 0

    def quantises(self, numels: tuple[int, ...]) -> bool:
        """Whether the states of a parameter are quantised, given the elements of its shards.

        All shards or none, so that a checkpoint holds one kind of state for each parameter.
        torchao itself decides for each shard; only unevenly divided parameters make a difference.
        """
        return all(n >= LEAST_QUANTISED and n % self.block == 0 for n in numels)

    def moment_bytes(self, numel: int) -> int:
        """Bytes of one quantised moment of `numel` elements."""
        return numel * self.bits // 8 + _FP32 * (numel // self.block + self.table)


LOW_BIT: dict[Optimizer, LowBit] = {
    "adamw-8bit": LowBit(bits=8, block=256, table=256),
    "adamw-4bit": LowBit(bits=4, block=128, table=16),
    "adamw-fp8": LowBit(bits=8, block=256),
}


# Optimizers whose update can run in host memory, element by element in a fused kernel, and their
# states of the parameter's shape.
ON_HOST: dict[Optimizer, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "momentum": ("momentum_buffer",),
    "sgd": (),
}


# The optimizer that plans propose to reduce the memory of states.
SMALLER_VARIANTS: dict[Optimizer, Optimizer] = {"adamw": "adamw-8bit"}


class Shard(NamedTuple):
    """The shards of one parameter."""

    # Shape of the shard on rank 0, which holds the most.
    shape: tuple[int, ...]
    # Elements of the largest and of the smallest shard.
    numels: tuple[int, int]
    # Whether the parameter belongs to a block, not to embeddings, final norm or head.
    in_block: bool = True

    @property
    def numel(self) -> int:
        """Elements of the shard on rank 0."""
        return math.prod(self.shape)


def state_tensors(optimizer: Optimizer) -> int | None:
    """Number of states, each with the parameter's shape; None if states have other shapes."""
    return _STATE_TENSORS.get(optimizer)


def state_bytes(optimizer: Optimizer, shard: Shard, itemsize: int) -> int:
    """Bytes of an optimizer's states for one parameter on rank 0, without its step counter.

    `itemsize` is bytes per element of the dtype in which the parameter is updated.
    """
    return _kept_elements(optimizer, shard) * itemsize + _quantised_bytes(optimizer, shard)


def _kept_elements(optimizer: Optimizer, shard: Shard) -> int:
    """Elements of the states on rank 0 that are kept in the parameter's dtype."""
    tensors = _STATE_TENSORS.get(optimizer)
    if tensors is not None:
        return tensors * shard.numel
    if optimizer == "adafactor":
        if len(shard.shape) < 2:
            return shard.numel
        *_, rows, columns = shard.shape
        # Row and column statistics of every matrix.
        return shard.numel // max(1, rows) + shard.numel // max(1, columns)
    if optimizer == "muon":
        return shard.numel * (1 if is_muon_matrix(len(shard.shape), shard.in_block) else 2)
    return 0 if LOW_BIT[optimizer].quantises(shard.numels) else 2 * shard.numel


def _quantised_bytes(optimizer: Optimizer, shard: Shard) -> int:
    """Bytes of the quantised states on rank 0; 0 if they are not quantised."""
    low_bit = LOW_BIT.get(optimizer)
    if low_bit is None or not low_bit.quantises(shard.numels):
        return 0
    return 2 * low_bit.moment_bytes(shard.numel)


def is_muon_matrix(dimensions: int, in_block: bool) -> bool:
    """Whether Muon updates a parameter of so many dimensions: matrices of blocks only.

    AdamW updates embeddings, head, norms and biases.
    """
    return in_block and dimensions == 2
