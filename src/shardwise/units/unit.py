"""A model as a sequence of units: the input of all predictions.

A unit is one `fully_shard` group. Quantities that grow with the batch are per token of one
device's micro-batch, at the units' sequence length; a model without tokens (a CNN) counts samples
instead. The argument `shard` is the number of devices that a parameter is sharded over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from shardwise.spec.adapter import Adapter
from shardwise.spec.dtype import DTYPE_BYTES
from shardwise.units.division import NO_EXCHANGES, UNDIVIDED, Division, Exchanges
from shardwise.units.stage import (
    Stage,
    joined_stage,
)

# Elements of a block of torchao's NF4 times scales per block of scales: each rank holds full blocks
# of scales.
QUANTISED_BLOCK = 64 * 256
# Bytes per quantised parameter that every device holds: the 16 values, and the mean of the scales.
QUANTISED_TABLE = 34
# Bytes per element while torchao dequantises a matrix: half an index of 8 bytes for each of two
# halves, the values, the scaled values, the result, and a scale per 64 elements.
DEQUANTISING_BYTES = 8 + 2 + 2 + 2 + 2 / 64


def dequantised_parts(shape: Sequence[int]) -> int:
    """In how many equal parts stacked matrices are dequantised; 1 for a single matrix.

    Each part is of full matrices and full blocks of scales.
    """
    return math.gcd(shape[0], math.prod(shape) // QUANTISED_BLOCK) if len(shape) == 3 else 1


def dequantising_bytes(shape: Sequence[int], itemsize: int) -> float:
    """Bytes per element while a quantised weight is dequantised to a dtype of `itemsize` bytes.

    Stacked matrices are dequantised part by part into one copy.
    """
    parts = dequantised_parts(shape)
    return DEQUANTISING_BYTES if parts == 1 else itemsize + DEQUANTISING_BYTES / parts


class Parameter(NamedTuple):
    """One parameter tensor and its unsharded shape."""

    name: str
    shape: tuple[int, ...]
    # In the root unit: used after the blocks (final norm, head), not before them (embeddings).
    after_blocks: bool = False
    # Frozen parameters are gathered like others, but have neither gradients nor optimizer states.
    trainable: bool = True
    # The sharded dimension; None lets `shard_dimension` choose it.
    dim: int | None = None
    # Bytes per element of a frozen parameter in memory; None for the master dtype.
    stored: float | None = None
    # Bytes per element if the parameter can be quantised: it is then gathered as stored, and
    # dequantised to the compute dtype when used. None if it cannot be quantised.
    quantised: float | None = None
    # Gathered in the stored dtype, as FSDP2 does without a dtype in its mixed-precision policy.
    uncast: bool = False
    # Gathered with one byte per element, in the dtype of the matrix products.
    in_low_bits: bool = False
    # Of the experts that an expert group divides. The shape is one device's part, which only the
    # devices with the same experts share.
    expert: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def padded_numel(self, shard: int) -> int:
        """Elements on all devices, after FSDP2 pads the sharded dimension to equal shards."""
        if self.is_packed(shard):
            return self.numel
        rows = self.shape[self.sharded_dim(shard)] if self.shape else 1
        return -(-rows // shard) * shard * (self.numel // max(1, rows))

    def is_packed(self, shard: int) -> bool:
        """Whether this parameter is quantised over `shard` devices: each must hold full blocks."""
        if self.quantised is None:
            return False
        # Stacked matrices are stored one below the other.
        rows = self.numel // self.shape[-1]
        return self.numel % (QUANTISED_BLOCK * shard) == 0 and rows % shard == 0

    def stored_bytes(self, shard: int) -> float:
        """Bytes of a frozen parameter on all devices; 0 for a parameter in the master dtype."""
        if self.is_packed(shard):
            return self.packed_bytes(shard) + QUANTISED_TABLE * shard
        return self.padded_numel(shard) * (self.stored or 0.0)

    def packed_bytes(self, shard: int) -> float:
        """Bytes of this parameter when gathered in quantised form."""
        return self.padded_numel(shard) * (self.quantised or 0.0)

    def sharded_dim(self, shard: int) -> int:
        """The dimension along which this parameter is sharded over `shard` devices."""
        if self.is_packed(shard):
            return 0
        return shard_dimension(self.shape, shard) if self.dim is None else self.dim


def frozen(parameter: Parameter, adapter: Adapter, matrix: bool) -> Parameter:
    """The parameter as not trained, stored as an adapter's `base` says.

    `matrix` marks the weight of a linear layer of a block, which can be quantised or in fp8, and
    the matrices of stacked experts, which can be quantised.
    """
    stacked = len(parameter.shape) == 3
    if matrix and adapter.base == "fp8" and not stacked:
        return parameter._replace(trainable=False, stored=1.0, in_low_bits=True)
    matrix = matrix and (adapter.quantised_experts or not stacked)
    return parameter._replace(
        trainable=False,
        stored=float(DTYPE_BYTES[adapter.float_dtype]),
        quantised=adapter.quantised_bytes if matrix else None,
    )


def shard_dimension(shape: Sequence[int], shard: int) -> int:
    """The dimension along which a tensor is sharded over `shard` devices.

    Dimension 0, which FSDP2 pads if needed. Stacked experts (3 dimensions) have few rows, so they
    are sharded along the first dimension that needs no padding, if there is one.
    """
    if len(shape) < 3:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % shard == 0), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """One `fully_shard` group: its parameters and its computation.

    A unit of several blocks has these as `members`. Blocks run one after the other and are
    recomputed one by one; the unit's stage holds only their sums.
    """

    name: str
    parameters: tuple[Parameter, ...]
    stage: Stage = field(default_factory=Stage)
    members: tuple[Unit, ...] = ()

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The blocks of this unit: its members, or the unit itself if it is one block."""
        return self.members or (self,)

    @cached_property
    def groups(self) -> tuple[Unit, ...]:
        """The unit's parameters by the group of devices that shards them, in forward order.

        First what all devices share that hold one copy of the model states, then the divided
        experts of each block. A unit without divided experts is its only group.
        """
        shared = tuple(p for p in self.parameters if not p.expert)
        if len(shared) == len(self.parameters) or self.of_experts:
            return (self,)
        divided = [tuple(p for p in block.parameters if p.expert) for block in self.blocks]
        experts = {
            id(block): Unit(name="experts", parameters=own)
            for block, own in zip(self.blocks, divided, strict=True)
            if own
        }
        return (
            Unit(name=self.name, parameters=shared),
            *(experts[id(block)] for block in self.blocks if id(block) in experts),
        )

    @cached_property
    def of_experts(self) -> bool:
        """Whether this is a group of divided experts."""
        return any(p.expert for p in self.parameters) and all(p.expert for p in self.parameters)

    @property
    def axis(self) -> str:
        """Of a group: the axis of the mesh along which it is sharded."""
        return "expert_shard" if self.of_experts else "shard"

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that are not frozen."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def trained_numel(self) -> int:
        return sum(parameter.numel for parameter in self.trained)

    @cached_property
    def largest_numel(self) -> float:
        """Elements of the largest parameter."""
        return float(max((parameter.numel for parameter in self.parameters), default=0))

    @cached_property
    def largest_gradient(self) -> float:
        """Elements of the largest gradient."""
        return float(max((parameter.numel for parameter in self.trained), default=0))

    def padded_numel(self, shard: int) -> int:
        """Elements of all parameters, padded for `shard` devices."""
        return sum(parameter.padded_numel(shard) for parameter in self.parameters)

    def padded_trained(self, shard: int) -> int:
        """Elements of the trained parameters, padded for `shard` devices."""
        return sum(parameter.padded_numel(shard) for parameter in self.trained)

    @cached_property
    def quantised(self) -> tuple[Parameter, ...]:
        """The parameters that can be quantised; `packed` gives those that are."""
        return tuple(p for p in self.parameters if p.quantised is not None)

    def packed(self, shard: int) -> tuple[Parameter, ...]:
        """The parameters that are quantised when sharded over `shard` devices."""
        return tuple(p for p in self.quantised if p.is_packed(shard))

    def copied_numel(self, shard: int, name: str) -> int:
        """Elements of the parameter `name` if it is quantised, else 0."""
        return next((p.numel for p in self.packed(shard) if p.name == name), 0)

    def packed_numel(self, shard: int) -> int:
        """Elements of the quantised parameters, padded."""
        return sum(parameter.padded_numel(shard) for parameter in self.packed(shard))

    def packed_bytes(self, shard: int) -> float:
        """Bytes of the quantised parameters when gathered."""
        return sum(parameter.packed_bytes(shard) for parameter in self.packed(shard))

    @cached_property
    def uncast(self) -> tuple[Parameter, ...]:
        """The parameters that are gathered in their stored dtype, not the compute dtype."""
        return tuple(p for p in self.parameters if p.uncast)

    def uncast_numel(self, shard: int) -> int:
        """Elements of the parameters in `uncast`, padded."""
        return sum(parameter.padded_numel(shard) for parameter in self.uncast)

    def uncast_bytes(self, shard: int) -> float:
        """Bytes of the parameters in `uncast` on all devices."""
        return sum(parameter.stored_bytes(shard) for parameter in self.uncast)

    @cached_property
    def gathered_in_low_bits(self) -> tuple[Parameter, ...]:
        """The parameters that are gathered with one byte per element."""
        return tuple(p for p in self.parameters if p.in_low_bits)

    def low_bit_numel(self, shard: int) -> int:
        """Elements of the parameters in `gathered_in_low_bits`, padded."""
        return sum(parameter.padded_numel(shard) for parameter in self.gathered_in_low_bits)

    def master_numel(self, shard: int) -> int:
        """Elements of the parameters stored in the master dtype, padded."""
        return sum(p.padded_numel(shard) for p in self.parameters if p.stored is None)

    def stored_bytes(self, shard: int) -> float:
        """Bytes on all devices of the parameters that are not stored in the master dtype."""
        return sum(parameter.stored_bytes(shard) for parameter in self.parameters)

    def wide_numel(self, itemsize: int) -> int:
        """Elements of unsharded parameters that autocast copies to a dtype of `itemsize` bytes."""
        return sum(
            p.numel
            for p in self.parameters
            if not p.is_packed(1) and (p.stored is None or p.stored > itemsize)
        )

    @cached_property
    def along_rows(self) -> Unit:
        """A copy of the unit with every parameter sharded along its first dimension."""
        return replace(
            self,
            parameters=tuple(parameter._replace(dim=0) for parameter in self.parameters),
            members=tuple(member.along_rows for member in self.members),
        )

    def rearranged(self, shard: int) -> int:
        """Elements not sharded along the first dimension: copied once more after an all-gather."""
        return sum(p.numel for p in self.parameters if p.sharded_dim(shard))

    def rearranged_trained(self, shard: int) -> int:
        """Elements of the gradients that are copied once more before a reduce-scatter.

        Those that are not sharded along the first dimension.
        """
        return sum(p.numel for p in self.trained if p.sharded_dim(shard))

    def last_rearranged(self, shard: int) -> int:
        """Elements of the last gradient that `rearranged_trained` counts; 0 if there is none."""
        return next((p.numel for p in reversed(self.trained) if p.sharded_dim(shard)), 0)

    def held_while_scattered(self, shard: int) -> int:
        """Elements of the gradients that FSDP still holds during their reduce-scatter.

        The last gradient and, if it is another, the last one that is copied once more (see
        `rearranged_trained`); 0 if no parameter is trained. `shard` is a number of devices.
        """
        if not self.trained:
            return 0
        last = self.trained[-1]
        return last.numel + (0 if last.sharded_dim(shard) else self.last_rearranged(shard))


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelUnits:
    """A model for predictions: the blocks in forward order, and the root that owns the rest.

    The root's stage runs after the blocks (final norm, head, loss). The embedding has
    negligible FLOPs, but its gradient is computed last: `embedding_gradient_elements` counts it.
    Equal blocks are one object, so that a prediction computes each kind once.
    """

    name: str
    seq_len: int
    root: Unit
    blocks: tuple[Unit, ...]
    tied: bool = False
    # Bytes per token of a block's output, and of the gradient that passes between blocks.
    boundary_bytes: float = 0.0
    embedding_gradient_elements: float = 0.0
    # Units are those of one device; the other devices of its group hold as much.
    division: Division = UNDIVIDED
    # Collectives of the embedding's lookup and its backward, and bytes per token of the lookup's
    # output before they divide it.
    lookup: Exchanges = NO_EXCHANGES
    lookup_bytes: float = 0.0
    # Parameters of the full model, if a device holds only a part; else None.
    whole_numel: int | None = None
    # Elements of the full embedding, if a device holds only a part; else 0. DTensor computes a
    # gradient of the full table, of which each device then takes its part.
    whole_table: int = 0
    # A reference model beside the trained one: a frozen copy, or the model without its adapters.
    reference: Literal["copy", "shared"] | None = None
    # Bytes of a device that the user sets aside for the generation of answers.
    reserved_bytes: float = 0.0

    @cached_property
    def size_of_degree(self) -> dict[tuple[object, ...], float]:
        """A cache of unit sizes by degree of sharding, shared by all programs of these units."""
        return {}

    @property
    def numel(self) -> int:
        """Number of parameters that one device computes with, before sharding."""
        return self.root.numel + sum(block.numel for block in self.blocks)

    @property
    def parameters(self) -> int:
        """Number of parameters of the full model."""
        return self.numel if self.whole_numel is None else self.whole_numel

    @property
    def trained_numel(self) -> int:
        return sum(unit.trained_numel for unit in self.units)

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units: the blocks in forward order, then the root."""
        return (*self.blocks, self.root)

    @property
    def single_blocks(self) -> tuple[Unit, ...]:
        """All blocks in forward order, also those grouped in one unit."""
        return tuple(block for unit in self.blocks for block in unit.blocks)

    @property
    def frozen_in_fp8(self) -> bool:
        """Whether frozen matrices are stored in fp8 and multiplied as they are."""
        frozen = (p for block in self.blocks[:1] for p in block.parameters if not p.trainable)
        return any(p.in_low_bits and p.stored == 1.0 for p in frozen)

    def forward_flops(self) -> float:
        """Forward FLOPs per token of all units, on one device of a tensor group."""
        return sum(unit.stage.forward_flops for unit in self.units)

    def backward_flops(self) -> float:
        """Backward FLOPs per token of all units, on one device of a tensor group.

        Twice the forward's if everything is trained.
        """
        return sum(unit.stage.backward_flops for unit in self.units)

    def in_order(self) -> tuple[Parameter, ...]:
        """All parameters, in the order in which the forward uses them."""
        first = tuple(p for p in self.root.parameters if not p.after_blocks)
        last = tuple(p for p in self.root.parameters if p.after_blocks)
        blocks = tuple(p for block in self.blocks for p in block.parameters)
        return (*first, *blocks, *last)

    @cached_property
    def parts_of_root(self) -> tuple[Unit, Unit, Unit]:
        """The root as three units: the embedding table, what runs after the blocks, the rest."""
        before = [p for p in self.root.parameters if not p.after_blocks]
        table = max(before, key=lambda p: p.numel, default=None)
        rest = tuple(p for p in before if p is not table)
        head = tuple(p for p in self.root.parameters if p.after_blocks)
        embedding = (table,) if table is not None else ()
        return (
            Unit(name="embedding", parameters=embedding),
            Unit(name="head", parameters=head),
            Unit(name="root", parameters=rest),
        )

    def sharded_along_rows(self) -> ModelUnits:
        """A copy of the model with every parameter sharded along its first dimension."""
        blocks = tuple(block.along_rows for block in self.blocks)
        return replace(self, root=self.root.along_rows, blocks=blocks)

    def grouped(self, blocks_per_unit: int) -> ModelUnits:
        """A copy of the model with `blocks_per_unit` consecutive blocks in each unit."""
        if blocks_per_unit == 1:
            return self
        made: dict[tuple[int, ...], Unit] = {}
        groups = []
        for start in range(0, len(self.blocks), blocks_per_unit):
            members = self.blocks[start : start + blocks_per_unit]
            key = tuple(id(member) for member in members)
            if key not in made:
                made[key] = _join_units(members)
            groups.append(made[key])
        return replace(self, blocks=tuple(groups))


def _join_units(members: tuple[Unit, ...]) -> Unit:
    """One unit of several blocks, which run one after the other; in reverse in the backward."""
    if len(members) == 1:
        return members[0]
    stage = joined_stage([member.stage for member in members])
    parameters = tuple(
        parameter._replace(name=f"{index}.{parameter.name}")
        for index, member in enumerate(members)
        for parameter in member.parameters
    )
    return Unit(
        name=f"{members[0].name}+{len(members) - 1}",
        parameters=parameters,
        stage=stage,
        members=members,
    )
