"""The strategy: how parameters, gradients and optimizer states are sharded and moved."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from shardwise.spec.compression import FIRST_START, Compress, problems_of_compression
from shardwise.spec.contradictions import (
    problems_of_experts,
    problems_of_inner_axes,
    problems_of_low_bits,
    problems_of_states,
)
from shardwise.spec.degrees import degrees_on
from shardwise.spec.dispatch import Dispatch
from shardwise.spec.dtype import DType, LinearDType
from shardwise.spec.mesh import AXES, Axis, InnerAxis, Mesh
from shardwise.spec.record import Record, SpecError, did_you_mean
from shardwise.spec.shares import Share, check_shares, problems_of_shares, with_most
from shardwise.spec.states import (
    Offload,
    Part,
    States,
    offloaded_parts,
    read_offload,
    read_states,
)

Kind = Literal["single", "ddp", "zero1", "zero2", "zero3"]
GradSync = Literal["every", "local", "last"]
Loss = Literal["plain", "chunked", "fused"]
LossKernel = Literal["liger", "cut_cross_entropy"]
Attention = Literal["sdpa", "flash-2", "flash-3", "flex", "eager"]
ContextMethod = Literal["ulysses", "ring"]
# The upper bound is far beyond any run, and small enough that bytes stay within 64 bits.
PositiveInt = Annotated[int, Field(ge=1, le=2**20)]
Fraction = Annotated[float, Field(ge=0, le=1)]

SHORTHANDS = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")
# Synonyms.
_ALIASES = {"fsdp": "zero3", "fsdp2": "zero3", "none": "single"}
_SHORTHAND = re.compile(r"(zero[123]):([0-9]{1,7})")
# Degrees after the kind, such as `zero3:8 tp4 cp2 ep8`.
_DEGREE = re.compile(r"(tp|cp|ep)([0-9]{1,7})")
_DEGREES = {"tp": "tensor", "cp": "context", "ep": "expert"}


# Fields that a shorthand sets.
PLACEMENT = ("kind", "shard", "replicate", "context", "tensor", "expert", "within_node",
             "reshard_after_forward", "reshard_after_backward", "grad_sync")  # fmt: skip


class Strategy(Record):
    """One configuration of parallel training on PyTorch's engine.

    The kinds are what `fully_shard` and DDP do, in the words of ZeRO:

    - `single`: one device, no communication.
    - `ddp`: everything replicated, gradients all-reduced in buckets.
    - `zero3`: parameters, gradients and optimizer state sharded; a unit's parameters are gathered
      for its forward and again for its backward.
    - `zero2`: as zero3, but parameters stay gathered from the first forward of a step to its last
      backward (`reshard_after_forward=False`).
    - `zero1`: as zero2, and gradients stay whole until the last micro-batch of the step. With one
      micro-batch per step it is the same run as zero2.

    Each of them can be combined with tensor parallelism, which divides every matrix among devices
    that compute together, and the zero kinds with context parallelism, which divides sequences,
    and expert parallelism, which sends tokens to the devices that hold their experts.

    Unset fields take the value that is right for the kind; `resolve` fills in the degrees.
    """

    kind: Kind
    shard: PositiveInt | None = None
    replicate: PositiveInt | None = None
    # Shard inside a node and replicate across nodes; `resolve` turns this into degrees.
    within_node: StrictBool = False
    # Degree of context parallelism, and how attention sees full sequences.
    context: PositiveInt = 1
    context_method: ContextMethod = "ulysses"
    # Degree of expert parallelism: devices of a group that shares one copy of the model states
    # (shard x context) that divide the experts among them. It takes no devices of its own.
    expert: PositiveInt = 1
    # How tokens travel to their experts. Unset, as the cluster's software sends them.
    dispatch: Dispatch | None = None
    # Degree of tensor parallelism, and whether activations between matrices are divided too.
    tensor: PositiveInt = 1
    sequence_parallel: StrictBool = True
    # Put the devices of a tensor group as far apart as possible, instead of next to each other.
    tensor_across_nodes: StrictBool = False
    micro_batch: PositiveInt = 1
    accumulate: PositiveInt = 1
    # Where devices compute different numbers of micro-batches in a step: how many, by consecutive
    # ranks. `accumulate` is then the most.
    shares: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    recompute: Literal["none", "selective", "full"] | Fraction = "none"
    param_dtype: DType = "bf16"
    reduce_dtype: DType = "fp32"
    master_dtype: DType = "fp32"
    # Another way to give `master_dtype`, with or without stochastic rounding of updates. Kept only
    # if it says more than the dtype.
    states: States | None = None
    # The dtype of matrix products in the linear layers of blocks, if fewer bits than `param_dtype`.
    # With `low_bit_gather`, which needs fp8, their weights are also all-gathered in it.
    linear_dtype: LinearDType | None = None
    low_bit_gather: StrictBool = False
    reshard_after_forward: StrictBool | PositiveInt | None = None
    reshard_after_backward: StrictBool | None = None
    grad_sync: GradSync | None = None
    # Units gathered ahead of the current one in the backward; `forward_prefetch` is the same in the
    # forward, beyond the one that the engine's own order already overlaps.
    prefetch: Annotated[int, Field(ge=0, le=8)] = 1
    forward_prefetch: Annotated[int, Field(ge=0, le=8)] = 0
    blocks_per_unit: PositiveInt = 1
    # Embedding and head are separate units, instead of staying gathered with the root all step.
    split_root: StrictBool = False
    # What is kept in host memory; true stands for parameters, gradients and optimizer states.
    offload: StrictBool | Offload = False
    compile: StrictBool = False
    # Compute head and loss on all tokens at once, on one chunk of tokens at a time, or with a fused
    # kernel: Liger's fused linear cross entropy, or Cut Cross-Entropy.
    loss: Loss = "plain"
    loss_chunks: Annotated[int, Field(ge=2, le=2**20)] = 8
    loss_kernel: LossKernel = "liger"
    # The attention kernel. Unset, that of the cluster's software.
    attention: Attention | None = None
    # Size of DDP's buckets. Unset, torch's default: 25 MiB after a small first bucket.
    ddp_bucket_mib: Annotated[float, Field(gt=0)] | None = None
    # How DDP compresses gradients before it averages them; the rank of PowerSGD's matrices, and the
    # number of steps before it begins.
    compress: Compress | None = None
    powersgd_rank: PositiveInt = 4
    powersgd_start: Annotated[int, Field(ge=FIRST_START, le=2**31)] = 1000

    @field_validator("recompute", mode="before")
    @classmethod
    def _policy_or_share(cls, value: object) -> object:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value in ("none", "selective", "full") or (number and 0 <= float(value) <= 1):  # type: ignore[arg-type]
            return value
        raise ValueError(
            f"{str(value)[:60]!r} is not one of none, selective, full, nor a share of the blocks "
            f"from 0 to 1 such as 0.5{did_you_mean(str(value), ('none', 'selective', 'full'))}"
        )

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _keep_integers(cls, value: object) -> object:
        # 1 and 0 would be read as booleans; as group sizes they are not useful.
        if isinstance(value, int) and not isinstance(value, bool) and value < 2:
            raise ValueError("as a group size must be at least 2; use true or false")
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_shorthand_kind(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("kind") == "hsdp":
            return {**data, "kind": "zero3", "within_node": True}
        return data

    @field_validator("offload", mode="before")
    @classmethod
    def _read_offload(cls, value: object) -> object:
        return read_offload(value)

    @model_validator(mode="before")
    @classmethod
    def _read_shares(cls, data: object) -> object:
        return with_most(data)

    @model_validator(mode="before")
    @classmethod
    def _read_states(cls, data: object) -> object:
        if not isinstance(data, dict) or data.get("states") is None:
            return data
        read = read_states(data["states"])
        if data.get("master_dtype", read["master_dtype"]) != read["master_dtype"]:
            raise ValueError(
                f"states '{data['states']}' keeps master weights in {read['master_dtype']}; leave "
                "master_dtype out"
            )
        return {**data, **read}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.kind == "single" and self.devices > 1:
            problems.append("kind 'single' uses one device; set shard and replicate to 1")
        if self.kind == "ddp" and (self.shard or 1) > 1:
            problems.append(
                "kind 'ddp' shards nothing; set shard to 1 or choose zero1, zero2, zero3"
            )
        if self.sharded and self.shard == self.context == 1 and (self.replicate or 1) > 1:
            problems.append("a shard degree of 1 shards nothing; choose ddp or leave shard out")
        if self.kind in ("single", "ddp"):
            if self.reshard_after_forward not in (None, False):
                problems.append(f"reshard_after_forward means nothing for kind '{self.kind}'")
            if self.offloads("parameters"):
                problems.append(f"offload needs sharding; kind '{self.kind}' has none: use zero3")
            if self.split_root:
                problems.append(f"split_root means nothing for kind '{self.kind}'")
        if self.kind in ("zero1", "zero2") and self.reshard_after_forward not in (None, False):
            problems.append(
                f"kind '{self.kind}' keeps parameters gathered; "
                "for reshard_after_forward choose kind 'zero3'"
            )
        if self.within_node and self.shard is not None:
            problems.append("within_node sets shard from the cluster; leave shard out")
        if self.loss_kernel == "cut_cross_entropy" and self.param_dtype not in ("bf16", "fp16"):
            problems.append("loss_kernel 'cut_cross_entropy' needs param_dtype 'bf16' or 'fp16'")
        problems += problems_of_inner_axes(self) + problems_of_low_bits(self)
        problems += problems_of_experts(self) + problems_of_states(self)
        problems += problems_of_compression(self)
        problems += problems_of_shares(self)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def full_recompute_share(self) -> float:
        """The share of blocks, counted from the first, that recompute everything: 0 to 1."""
        if isinstance(self.recompute, float):
            return self.recompute
        return 1.0 if self.recompute == "full" else 0.0

    @property
    def sharded(self) -> bool:
        """Whether the run is built with `fully_shard` (true for every zero kind)."""
        return self.kind in ("zero1", "zero2", "zero3")

    def offloads(self, part: Part) -> bool:
        """Whether this part is kept in host memory."""
        return part in offloaded_parts(self.offload)

    @property
    def kept_dtype(self) -> DType:
        """The dtype of trained parameters and their gradients on the device between steps.

        An offloaded optimizer keeps the master weights in host memory, and the device those that it
        computes with.
        """
        return self.param_dtype if self.offloads("optimizer") else self.master_dtype

    @property
    def autocast(self) -> bool:
        """Whether low precision comes from autocast: without sharding, no all-gather can cast."""
        return not self.sharded and self.param_dtype != self.kept_dtype

    @property
    def steps_uncompressed(self) -> int:
        """The number of first steps whose gradients are not compressed, though others are."""
        return self.powersgd_start if self.compress == "powersgd" else 0

    @property
    def hybrid(self) -> bool:
        """Whether states are sharded in groups that are replicated (HSDP); needs set degrees."""
        return self.sharded and self.mesh.states > 1 and self.mesh.replicate > 1

    @property
    def mesh(self) -> Mesh:
        """The degree along each axis; 1 for a degree that is not set."""
        return Mesh(self.replicate or 1, self.shard or 1, self.context, self.tensor)

    def stride(self, axis: Axis | InnerAxis) -> int:
        """Distance in ranks between neighbours along an axis."""
        if axis == "expert":
            return self.stride("context")
        order = ("tensor", *AXES[:-1]) if self.tensor_across_nodes else AXES
        inside = order[order.index(axis) + 1 :]
        return math.prod(getattr(self.mesh, name) for name in inside)

    @property
    def devices(self) -> int:
        return self.mesh.devices

    @property
    def data_parallel(self) -> int:
        return self.mesh.data_parallel

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step, over all data-parallel ranks; needs set degrees."""
        if self.shares is None:
            return self.accumulate * self.data_parallel
        return sum(one.devices * one.accumulate for one in self.shares) // self.mesh.inner

    def but(self, **changes: object) -> Self:
        """A validated copy with some fields changed; another accumulation is equal everywhere."""
        equal = {"shares": None} if "accumulate" in changes else {}
        return super().but(**{**equal, **changes})

    def unplaced(self) -> Strategy:
        """The strategy for any number of devices: sharding groups keep their size, replicas open.

        Without groups, the shard degree is open too.
        """
        # A shard degree without a replicate degree is the size of a group, such as zero3:8.
        groups = self.hybrid or self.replicate is None
        return self.but(shard=self.shard if groups else None, replicate=None)

    def as_kind(self, text: str) -> Strategy:
        """The strategy with the placement of a shorthand; all other settings are kept."""
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        for name in PLACEMENT:
            kept.pop(name)
        return Strategy.read({**kept, **parse_strategy(text)}, where="strategy")

    def resolve(self, devices: int, node_size: int) -> Strategy:
        """The strategy with every unset field decided for a cluster of `devices`.

        `node_size` is devices per node. Raises SpecError if degrees do not fit the cluster.
        """
        shard, replicate = degrees_on(self, devices, node_size)
        reshard_forward = self.reshard_after_forward
        if reshard_forward is None:
            reshard_forward = self.kind == "zero3"
        states = shard * self.context
        if not isinstance(reshard_forward, bool) and reshard_forward == states:
            reshard_forward = True
        if not isinstance(reshard_forward, bool) and (
            reshard_forward > states or states % reshard_forward
        ):
            raise SpecError(
                f"strategy.reshard_after_forward: {reshard_forward} must divide the shard degree "
                f"{states}"
            )
        reshard_backward = self.reshard_after_backward
        if reshard_backward is None:
            # Parameters that stay gathered in the forward may stay so between micro-batches: this
            # does not raise the peak.
            reshard_backward = reshard_forward is not False
        grad_sync = self.grad_sync
        if grad_sync is None:
            grad_sync = _DEFAULT_SYNC[self.kind]
            if grad_sync == "every" and shard * self.context > 1 and replicate > 1:
                grad_sync = "local"
        resolved = self.but(
            shard=shard,
            replicate=replicate,
            within_node=False,
            reshard_after_forward=reshard_forward,
            reshard_after_backward=reshard_backward,
            grad_sync=grad_sync,
        )
        check_shares(resolved)
        return resolved

    def __str__(self) -> str:
        groups = f" in {self.replicate} groups of {self.shard}" if self.hybrid else ""
        experts = f" × expert {self.expert}" if self.expert > 1 else ""
        return f"{self.kind}{groups}{self.mesh.in_words}{experts}"

    @property
    def shorthand(self) -> str:
        """The layout as `parse_strategy` reads it: "ddp", "zero3:8", "zero3 cp2 tp8 ep4"."""
        groups = f":{self.shard}" if self.hybrid else ""
        degrees = {"cp": self.context, "tp": self.tensor, "ep": self.expert}
        inner = "".join(f" {name}{degree}" for name, degree in degrees.items() if degree > 1)
        return f"{self.kind}{groups}{inner}"


_DEFAULT_SYNC: dict[Kind, GradSync] = {
    "single": "last",
    "ddp": "last",
    "zero1": "last",
    "zero2": "every",
    "zero3": "every",
}


def parse_strategy(text: str) -> dict[str, object]:
    """Strategy fields from a shorthand; raises SpecError if it cannot be read.

    `ddp`, `zero3`, `hsdp` or `zero3:8` (shard degree 8), followed by degrees such as `tp4`, `cp2`
    and `ep8`.
    """
    name, *degrees = text.strip().lower().split() or [""]
    name = _ALIASES.get(name, name)
    found: dict[str, object] = {}
    match = _SHORTHAND.fullmatch(name)
    if name in SHORTHANDS:
        found = {"kind": name}
    elif match and int(match[2]) > 0:
        found = {"kind": match[1], "shard": int(match[2])}
    for degree in degrees:
        read = _DEGREE.fullmatch(degree)
        if read is None or int(read[2]) < 1 or _DEGREES[read[1]] in found:
            found = {}
        if not found or read is None:
            break
        found[_DEGREES[read[1]]] = int(read[2])
    if found:
        return found
    raise SpecError(
        f"strategy: cannot read {text[:60]!r}; write one of {', '.join(SHORTHANDS)}, or zero3:8 "
        "for groups of 8, and behind it tp4, cp2 or ep8 for tensor, context or expert parallelism"
        f"{did_you_mean(name, SHORTHANDS)}"
    )
