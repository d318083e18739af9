"""What a unit computes: FLOPs, bytes saved for the backward, and live bytes during both passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from shardwise.spec.dtype import LinearDType
from shardwise.spec.strategy import Attention
from shardwise.units.division import NO_EXCHANGES, Exchanges, join_exchanges

Policy = Literal["none", "selective", "full"]


POLICIES: tuple[Policy, ...] = ("none", "selective", "full")


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
    # Name of the matrix that has a copy at this moment if it is quantised; bytes per element.
    copied: str | None = None
    copied_bytes: float = 0.0


NOTHING = Moment(activation_bytes=0.0, logit_bytes=0.0, gradient_elements=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """The computation of a unit per token: FLOPs, bytes, and memory in forward and backward."""

    matmul_flops: float = 0.0
    # Counted like torch.utils.flop_counter: every query with every visible key. A causal kernel
    # computes about half of these.
    attention_flops: float = 0.0
    # Most keys that a query sees.
    attention_span: int = 0
    head_dim: int = 128
    # Bytes that element-wise operations read and write: one by one, and with neighbours fused.
    elementwise_bytes: float = 0.0
    fused_bytes: float = 0.0
    kernels: int = 0
    # Number of matrix products of a forward, and the mean width of their outputs (harmonic,
    # weighted by FLOPs).
    products: int = 0
    product_width: float = 1.0
    # Grouped products, which run all experts in one kernel: their part of `matmul_flops`, rows per
    # token, and number of experts.
    grouped_flops: float = 0.0
    routed: float = 0.0
    experts: int = 0
    # Logits per token on this device, and the part of `elementwise_bytes` that operations on them
    # read and write; 0 where unknown.
    logits: float = 0.0
    logit_moved: float = 0.0
    # The attention kernel; None for that of the cluster's software.
    attention: Attention | None = None
    # Whether torch.compile fuses element-wise operations.
    compiled: bool = False
    # The low-bit dtype of matrix products; None if they run in the compute dtype.
    linear_dtype: LinearDType | None = None
    # Whether a library sends tokens to experts, in place of torch's all-to-all.
    by_library: bool = False
    # FLOPs of the backward's matmuls; None for twice the forward's (inputs and weights).
    gradient_flops: float | None = None
    kept: Mapping[Policy, Kept] = field(
        default_factory=lambda: {policy: Kept(activation_bytes=0.0) for policy in POLICIES}
    )
    # The moments that can be the peak, the one with the most activations first.
    forward: tuple[Moment, ...] = (NOTHING,)
    # The same under full recompute, when autograd saves nothing; empty if unknown.
    forward_unsaved: tuple[Moment, ...] = ()
    backward: tuple[Moment, ...] = (NOTHING,)
    # Collectives among the devices that divide this unit.
    exchanges: Exchanges = NO_EXCHANGES
    # The stage in parts, in forward order, if a group of parameters is gathered for one of them
    # only. Each has its own FLOPs, bytes, moments and collectives; together they are the stage.
    parts: tuple[Stage, ...] = ()
    # Of a part: whether it needs the divided experts; and bytes per token that are alive before its
    # forward, and after its backward.
    of_experts: bool = False
    before_bytes: float = 0.0
    after_bytes: float = 0.0

    def changed(self, **fields: Any) -> Stage:
        """A copy with other values of some fields, of its parts too."""
        parts = tuple(part.changed(**fields) for part in self.parts)
        return replace(self, parts=parts, **fields)

    @property
    def forward_peak(self) -> Moment:
        """The moment of the forward with the most activations and logits."""
        return self.forward[0]

    @property
    def forward_flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    @property
    def backward_matmul_flops(self) -> float:
        """Matmul FLOPs per token of the backward, without recomputation."""
        return 2.0 * self.matmul_flops if self.gradient_flops is None else self.gradient_flops

    @property
    def backward_flops(self) -> float:
        """FLOPs per token of the backward, without recomputation; attention counts twice."""
        return self.backward_matmul_flops + 2.0 * self.attention_flops

    def recomputed_flops(self, policy: Policy) -> float:
        """FLOPs per token that a recompute policy repeats in the backward."""
        kept = self.kept[policy]
        return kept.recomputed_matmul_flops + kept.recomputed_attention_flops


def joined_stage(stages: Sequence[Stage]) -> Stage:
    """One stage that sums several stages, which run one after the other."""
    return Stage(
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
        logit_moved=sum(s.logit_moved for s in stages),
        gradient_flops=sum(s.backward_matmul_flops for s in stages),
        kept={policy: _sum_kept([s.kept[policy] for s in stages]) for policy in POLICIES},
        exchanges=Exchanges(
            *(
                join_exchanges([*chain(*passes)])
                for passes in zip(*(s.exchanges for s in stages), strict=True)
            )
        ),
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
    """The harmonic mean width of products (FLOPs, width), weighted by FLOPs; 1.0 without FLOPs."""
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
        if not any(_at_least_as_much(other, moment) for other in best):
            best.append(moment)
    return tuple(best)


def _at_least_as_much(one: Moment, other: Moment) -> bool:
    """Whether `one` has at least the gradients and copies of `other`; ignores activations."""
    copies = other.copied is None or (
        one.copied == other.copied and one.copied_bytes >= other.copied_bytes
    )
    return copies and one.gradient_elements >= other.gradient_elements
