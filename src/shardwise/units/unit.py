"""A model as a sequence of units: the input of all predictions.

A unit is one `fully_shard` group. Quantities that grow with the batch are per token of one
device's micro-batch, at the units' sequence length; a model without tokens (a CNN) counts samples
instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

from shardwise.spec.adapter import Adapter
from shardwise.spec.dtype import DTYPE_BYTES, LinearDType
from shardwise.units.division import NO_EXCHANGES, WHOLE, Division, Exchanges, together

# Elements of a block of torchao's NF4 times the scales in a block: a rank holds full ones.
QUANTISED_BLOCK = 64 * 256
# Bytes that every device holds of each: the 16 values, and the mean of the scales.
QUANTISED_TABLE = 34
# Of an element of a quantised matrix, while torchao turns it into the compute dtype: half an index
# of 8 bytes for each of two halves, the values, the scaled values, the result, and a scale per 64.
DEQUANTISING_BYTES = 8 + 2 + 2 + 2 + 2 / 64

Policy = Literal["none", "selective", "full"]
POLICIES: tuple[Policy, ...] = ("none", "selective", "full")


class Parameter(NamedTuple):
    """One parameter tensor and its unsharded shape."""

    name: str
    shape: tuple[int, ...]
    # In the root unit: used after the blocks (final norm, head), not before them (embeddings).
    after_blocks: bool = False
    # Frozen parameters are gathered like others, but have neither gradients nor optimizer states.
    trainable: bool = True
    # The dimension that is divided among devices; unset, `shard_dimension` chooses it.
    dim: int | None = None
    # Bytes per element of a frozen parameter in memory; unset, those of the master dtype.
    stored: float | None = None
    # The same where it can be quantised: it is then gathered as it is stored, and turned into the
    # compute dtype where it is used.
    quantised: float | None = None
    # Gathered in the dtype it is stored in, as FSDP2 does without a dtype in its policy.
    uncast: bool = False
    # Gathered with one byte per element, in the dtype its products run in.
    in_low_bits: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def padded_numel(self, shard: int) -> int:
        """Elements after FSDP2 pads the sharded dimension so that ranks hold equal pieces."""
        rows = self.shape[self.sharded_dim(shard)] if self.shape else 1
        return -(-rows // shard) * shard * (self.numel // max(1, rows))

    def is_packed(self, shard: int) -> bool:
        """Whether it is quantised: `shard` devices must hold full blocks of it."""
        whole = self.numel % (QUANTISED_BLOCK * shard) == 0 and self.shape[0] % shard == 0
        return self.quantised is not None and whole

    def stored_bytes(self, shard: int) -> float:
        """Bytes of a frozen parameter on all devices together; 0 of one in the master dtype."""
        if self.is_packed(shard):
            return self.packed_bytes(shard) + QUANTISED_TABLE * shard
        return self.padded_numel(shard) * (self.stored or 0.0)

    def packed_bytes(self, shard: int) -> float:
        """What is gathered of a quantised parameter."""
        return self.padded_numel(shard) * (self.quantised or 0.0)

    def sharded_dim(self, shard: int) -> int:
        return shard_dimension(self.shape, shard) if self.dim is None else self.dim


def frozen(parameter: Parameter, adapter: Adapter, matrix: bool) -> Parameter:
    """A parameter that is not trained, as an adapter stores it; `matrix`: of a linear layer of a
    block.
    """
    return parameter._replace(
        trainable=False,
        stored=float(DTYPE_BYTES[adapter.float_dtype]),
        quantised=adapter.quantised_bytes if matrix else None,
    )


def shard_dimension(shape: Sequence[int], shard: int) -> int:
    """The dimension of a tensor that `shard` devices divide among them.

    The first, which FSDP2 pads where it must. Stacked experts have few rows there, so they are
    divided along the first dimension that needs no padding, if there is one.
    """
    if len(shape) < 3:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % shard == 0), 0)


class Kept(NamedTuple):
    """Bytes saved for the backward under a recompute policy, and FLOPs recomputed, per token."""

    activation_bytes: float
    logit_bytes: float = 0.0
    recomputed_matmul_flops: float = 0.0
    recomputed_attention_flops: float = 0.0
    # Saved outputs that the backward never reads; alive in addition to the recomputed tensors.
    unread_bytes: float = 0.0


class Moment(NamedTuple):
    """One point of a unit's forward or backward: live bytes per token, gradient elements so far."""

    activation_bytes: float
    logit_bytes: float
    gradient_elements: float
    # The matrix, by name, of which there is a copy if it is quantised, and bytes per element.
    copied: str | None = None
    copied_bytes: float = 0.0


NOTHING = Moment(activation_bytes=0.0, logit_bytes=0.0, gradient_elements=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """The computation of a unit: FLOPs, saved bytes, and memory during its backward."""

    matmul_flops: float = 0.0
    # As torch.utils.flop_counter counts: every query with every visible key. A causal kernel
    # computes about half of it.
    attention_flops: float = 0.0
    # Keys that a query sees, at most.
    attention_span: int = 0
    head_dim: int = 128
    # That element-wise operations read and write, one by one, and where neighbours are one kernel.
    elementwise_bytes: float = 0.0
    fused_bytes: float = 0.0
    kernels: int = 0
    # Matrix products of a forward, and the mean width of their outputs, weighed by FLOPs so that
    # what is done per column of them adds up.
    products: int = 0
    product_width: float = 1.0
    # Of the matmuls' FLOPs, those of grouped products, which run all experts in one kernel; the
    # rows of one such product per token, and its experts.
    grouped_flops: float = 0.0
    routed: float = 0.0
    experts: int = 0
    # Of the output: one of each word of the vocabulary, on this device.
    logits: float = 0.0
    # By torch.compile, which fuses element-wise operations.
    compiled: bool = False
    # What products run in, where that is fewer bits than the compute dtype has.
    linear_dtype: LinearDType | None = None
    # Of the backward's matmuls; unset, those of inputs and of weights: twice the forward's.
    gradient_flops: float | None = None
    kept: Mapping[Policy, Kept] = field(
        default_factory=lambda: {policy: Kept(activation_bytes=0.0) for policy in POLICIES}
    )
    # Those that can be the peak, the one with the most activations first.
    forward: tuple[Moment, ...] = (NOTHING,)
    # The same under full recompute, when autograd saves nothing; empty where it is not known.
    forward_unsaved: tuple[Moment, ...] = ()
    backward: tuple[Moment, ...] = (NOTHING,)
    # Collectives among the devices that divide it.
    exchanges: Exchanges = NO_EXCHANGES

    @property
    def forward_peak(self) -> Moment:
        return self.forward[0]

    @property
    def forward_flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    @property
    def backward_matmul_flops(self) -> float:
        return 2.0 * self.matmul_flops if self.gradient_flops is None else self.gradient_flops

    @property
    def backward_flops(self) -> float:
        return self.backward_matmul_flops + 2.0 * self.attention_flops

    def recomputed_flops(self, policy: Policy) -> float:
        kept = self.kept[policy]
        return kept.recomputed_matmul_flops + kept.recomputed_attention_flops


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """One `fully_shard` group: its parameters and its computation.

    A group of several blocks has them as `members`. They run one after the other and are
    recomputed one by one; the group's stage holds only the sums.
    """

    name: str
    parameters: tuple[Parameter, ...]
    stage: Stage = field(default_factory=Stage)
    members: tuple[Unit, ...] = ()

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The blocks in it: its members, or itself."""
        return self.members or (self,)

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
    def largest_gradient(self) -> float:
        """Elements of the largest gradient."""
        return float(max((parameter.numel for parameter in self.trained), default=0))

    def padded_numel(self, shard: int) -> int:
        return sum(parameter.padded_numel(shard) for parameter in self.parameters)

    def padded_trained(self, shard: int) -> int:
        return sum(parameter.padded_numel(shard) for parameter in self.trained)

    @cached_property
    def quantised(self) -> tuple[Parameter, ...]:
        """The parameters that can be quantised."""
        return tuple(p for p in self.parameters if p.quantised is not None)

    def packed(self, shard: int) -> tuple[Parameter, ...]:
        """Those that are, with so many devices."""
        return tuple(p for p in self.quantised if p.is_packed(shard))

    def copied_numel(self, shard: int, name: str) -> int:
        """Elements of a matrix if it is turned into the compute dtype to be used, else 0."""
        return next((p.numel for p in self.packed(shard) if p.name == name), 0)

    def packed_numel(self, shard: int) -> int:
        """Elements that are gathered as they are stored."""
        return sum(parameter.padded_numel(shard) for parameter in self.packed(shard))

    def packed_bytes(self, shard: int) -> float:
        return sum(parameter.packed_bytes(shard) for parameter in self.packed(shard))

    @cached_property
    def uncast(self) -> tuple[Parameter, ...]:
        """The parameters that nothing brings to the compute dtype."""
        return tuple(p for p in self.parameters if p.uncast)

    def uncast_numel(self, shard: int) -> int:
        return sum(parameter.padded_numel(shard) for parameter in self.uncast)

    def uncast_bytes(self, shard: int) -> float:
        return sum(parameter.stored_bytes(shard) for parameter in self.uncast)

    @cached_property
    def gathered_in_low_bits(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.in_low_bits)

    def low_bit_numel(self, shard: int) -> int:
        """Elements that are gathered with one byte each."""
        return sum(parameter.padded_numel(shard) for parameter in self.gathered_in_low_bits)

    def master_numel(self, shard: int) -> int:
        """Elements kept in the master dtype."""
        return sum(p.padded_numel(shard) for p in self.parameters if p.stored is None)

    def stored_bytes(self, shard: int) -> float:
        """Bytes of all that is stored in another way."""
        return sum(parameter.stored_bytes(shard) for parameter in self.parameters)

    def wide_numel(self, itemsize: int) -> int:
        """Elements that autocast copies to compute in a dtype of `itemsize` bytes."""
        return sum(
            p.numel
            for p in self.parameters
            if not p.is_packed(1) and (p.stored is None or p.stored > itemsize)
        )

    @cached_property
    def along_rows(self) -> Unit:
        """The same unit with every parameter sharded along its first dimension."""
        return replace(
            self,
            parameters=tuple(parameter._replace(dim=0) for parameter in self.parameters),
            members=tuple(member.along_rows for member in self.members),
        )

    def rearranged(self, shard: int) -> int:
        """Elements not sharded along the first dimension: copied once more after a gather."""
        return sum(p.numel for p in self.parameters if p.sharded_dim(shard))

    def rearranged_trained(self, shard: int) -> int:
        """Those of them that have gradients: copied once more before a reduce-scatter."""
        return sum(p.numel for p in self.trained if p.sharded_dim(shard))

    def last_rearranged(self, shard: int) -> int:
        """Elements of the last gradient that is copied once more before a reduce-scatter."""
        return next((p.numel for p in reversed(self.trained) if p.sharded_dim(shard)), 0)

    def held_while_scattered(self, shard: int) -> int:
        """Elements of the gradients that the engine refers to during a reduce-scatter.

        The last gradient, and the last one that was copied once more.
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
    # Bytes per token of a block's output: the gradient that passes between blocks.
    boundary_bytes: float = 0.0
    embedding_gradient_elements: float = 0.0
    # Units are those of one device; the others of its group hold as much.
    division: Division = WHOLE
    # Of the embedding's lookup and of its backward, and bytes per token that they make one of.
    lookup: Exchanges = NO_EXCHANGES
    lookup_bytes: float = 0.0
    # Parameters of the whole model, where a device holds a part.
    whole_numel: int | None = None
    # Elements of the whole embedding, where a device holds a part: DTensor makes a gradient of all
    # of it, of which each device then takes its part.
    whole_table: int = 0

    @cached_property
    def size_of_degree(self) -> dict[tuple[object, ...], float]:
        """Sizes of units by degree of sharding, kept here for all programs of these units."""
        return {}

    @property
    def numel(self) -> int:
        """Parameters that one device computes with."""
        return self.root.numel + sum(block.numel for block in self.blocks)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.numel if self.whole_numel is None else self.whole_numel

    @property
    def trained_numel(self) -> int:
        return sum(unit.trained_numel for unit in self.units)

    @property
    def units(self) -> tuple[Unit, ...]:
        return (*self.blocks, self.root)

    @property
    def single_blocks(self) -> tuple[Unit, ...]:
        """The blocks in forward order, however they are grouped."""
        return tuple(block for unit in self.blocks for block in unit.blocks)

    def forward_flops(self) -> float:
        """Forward FLOPs per token of the whole model."""
        return sum(unit.stage.forward_flops for unit in self.units)

    def backward_flops(self) -> float:
        """Backward FLOPs per token: twice the forward's if everything is trained."""
        return sum(unit.stage.backward_flops for unit in self.units)

    def in_order(self) -> tuple[Parameter, ...]:
        """Every parameter, in the order in which the forward uses them."""
        first = tuple(p for p in self.root.parameters if not p.after_blocks)
        last = tuple(p for p in self.root.parameters if p.after_blocks)
        blocks = tuple(p for block in self.blocks for p in block.parameters)
        return (*first, *blocks, *last)

    @cached_property
    def parts_of_root(self) -> tuple[Unit, Unit, Unit]:
        """The root split: the embedding's table, what the head uses, and the rest."""
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
        """The same model as code shards it that always divides dimension 0."""
        blocks = tuple(block.along_rows for block in self.blocks)
        return replace(self, root=self.root.along_rows, blocks=blocks)

    def grouped(self, blocks_per_unit: int) -> ModelUnits:
        """The same model with `blocks_per_unit` consecutive blocks in each unit."""
        if blocks_per_unit == 1:
            return self
        made: dict[tuple[int, ...], Unit] = {}
        groups = []
        for start in range(0, len(self.blocks), blocks_per_unit):
            members = self.blocks[start : start + blocks_per_unit]
            key = tuple(id(member) for member in members)
            if key not in made:
                made[key] = _joined(members)
            groups.append(made[key])
        return replace(self, blocks=tuple(groups))


def _joined(members: tuple[Unit, ...]) -> Unit:
    """One unit that runs `members` in turn; its backward runs them in reverse."""
    if len(members) == 1:
        return members[0]
    stages = [member.stage for member in members]
    stage = Stage(
        matmul_flops=sum(s.matmul_flops for s in stages),
        attention_flops=sum(s.attention_flops for s in stages),
        attention_span=max(s.attention_span for s in stages),
        head_dim=min(s.head_dim for s in stages),
        elementwise_bytes=sum(s.elementwise_bytes for s in stages),
        fused_bytes=sum(s.fused_bytes for s in stages),
        kernels=sum(s.kernels for s in stages),
        products=sum(s.products for s in stages),
        product_width=mean_width([(s.matmul_flops, s.product_width) for s in stages]),
        grouped_flops=sum(s.grouped_flops for s in stages),
        routed=sum(s.routed for s in stages),
        experts=max(s.experts for s in stages),
        logits=sum(s.logits for s in stages),
        gradient_flops=sum(s.backward_matmul_flops for s in stages),
        kept={policy: _sum_kept([s.kept[policy] for s in stages]) for policy in POLICIES},
        exchanges=Exchanges(
            *(
                together([*chain(*passes)])
                for passes in zip(*(s.exchanges for s in stages), strict=True)
            )
        ),
    )
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


def _sum_kept(kept: list[Kept]) -> Kept:
    return Kept(
        activation_bytes=sum(k.activation_bytes for k in kept),
        logit_bytes=sum(k.logit_bytes for k in kept),
        recomputed_matmul_flops=sum(k.recomputed_matmul_flops for k in kept),
        recomputed_attention_flops=sum(k.recomputed_attention_flops for k in kept),
        unread_bytes=sum(k.unread_bytes for k in kept),
    )


def mean_width(products: Iterable[tuple[float, float]]) -> float:
    """The harmonic mean of the widths of products, each with its FLOPs."""
    known = [(flops, width) for flops, width in products if flops > 0]
    per_column = sum(flops / width for flops, width in known)
    return sum(flops for flops, _ in known) / per_column if known else 1.0


def prune(moments: list[Moment]) -> tuple[Moment, ...]:
    """The moments that can be the peak at some batch size: the Pareto front."""
    best: list[Moment] = []
    ordered = sorted(
        moments,
        key=lambda m: (-m.activation_bytes - m.logit_bytes, -m.gradient_elements, -m.copied_bytes),
    )
    for moment in ordered:
        if not any(_as_much(other, moment) for other in best):
            best.append(moment)
    return tuple(best)


def _as_much(one: Moment, other: Moment) -> bool:
    """Whether `one`, with no fewer activations, also has no less of all else."""
    copies = other.copied is None or (
        one.copied == other.copied and one.copied_bytes >= other.copied_bytes
    )
    return copies and one.gradient_elements >= other.gradient_elements
