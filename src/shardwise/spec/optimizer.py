"""The optimizers by name, and what each keeps between steps, by formula."""

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
TRAINED: tuple[Optimizer, ...] = tuple(name for name in OPTIMIZERS if name != "lion")

# States in the dtype and shape of the parameter, where an optimizer keeps nothing else.
_TENSORS: dict[Optimizer, int] = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0}
# torchao quantises no smaller tensors, as bitsandbytes does.
LEAST_QUANTISED = 4096
_FP32 = 4


class LowBit(NamedTuple):
    """How torchao stores both moments of AdamW: codes, and one fp32 scale per block."""

    bits: int
    block: int
    # fp32 values that codes stand for: one table for each moment of each parameter.
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


# What plans propose where the states of this optimizer take the memory.
SMALLER: dict[Optimizer, Optimizer] = {"adamw": "adamw-8bit"}


class Shard(NamedTuple):
    """What the devices hold of one parameter."""

    # On rank 0, which holds the most.
    shape: tuple[int, ...]
    # Elements of the largest and of the smallest shard.
    numels: tuple[int, int]
    # Belongs to a block, not to embeddings, final norm or head.
    in_block: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def state_tensors(optimizer: Optimizer) -> int | None:
    """States per parameter, each as large as it; None if an optimizer keeps something else."""
    return _TENSORS.get(optimizer)


def state_bytes(optimizer: Optimizer, shard: Shard, itemsize: int) -> int:
    """Bytes that an optimizer keeps for one parameter on rank 0, without its step counter.

    `itemsize` is that of the dtype the parameter is updated in.
    """
    return _kept_elements(optimizer, shard) * itemsize + _quantised_bytes(optimizer, shard)


def _kept_elements(optimizer: Optimizer, shard: Shard) -> int:
    """Elements that are kept in the parameter's dtype."""
    tensors = _TENSORS.get(optimizer)
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
    low_bit = LOW_BIT.get(optimizer)
    if low_bit is None or not low_bit.quantises(shard.numels):
        return 0
    return 2 * low_bit.moment_bytes(shard.numel)


def is_muon_matrix(dimensions: int, in_block: bool) -> bool:
    """Whether Muon updates a parameter; AdamW updates embeddings, head, norms and biases."""
    return in_block and dimensions == 2
