"""What a recorder has recorded of one unit, and the Stage computed from that."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.pytorch.operations import Elementwise, fused_cost
from shardwise.units.stage import NOTHING, POLICIES, Kept, Moment, Policy, Stage, mean_width, prune


@dataclass
class Record:
    """What was recorded of one unit. Bytes and FLOPs are totals of the traced batch."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    # FLOPs and output width of each matrix product.
    widths: list[tuple[float, float]] = field(default_factory=list)
    # Keys that a query sees, and the width of a head.
    attention_span: int = 0
    head_dim: int = 0
    # Grouped products of all experts: FLOPs, rows of the largest, and its number of experts.
    grouped_flops: float = 0.0
    grouped_rows: int = 0
    experts: int = 0
    # FLOPs of the backward's matmuls; frozen weights and inputs without a gradient have none.
    gradient_flops: float = 0.0
    kernels: int = 0
    # Element-wise operations in the order they ran.
    elementwise: list[Elementwise] = field(default_factory=list)
    saved_bytes: float = 0.0
    saved_logit_bytes: float = 0.0
    input_bytes: float = 0.0
    # FLOPs until the last tensor was saved: recomputation stops there.
    matmul_flops_at_last_save: float = 0.0
    attention_flops_at_last_save: float = 0.0
    matmuls: int = 0
    # Bytes of outputs that selective recomputation keeps, and of those that the backward reads.
    chosen_bytes: float = 0.0
    chosen_read_bytes: float = 0.0
    chosen_matmul_flops: float = 0.0
    chosen_matmul_flops_at_last_save: float = 0.0
    chosen_alive: dict[int, int] = field(default_factory=dict)
    # Memory in bytes after each operation, and before each that reads a quantised weight.
    forward: list[Moment] = field(default_factory=list)
    # The same for a forward that saves nothing, as under full recompute.
    unsaved: list[Moment] = field(default_factory=list)
    backward: list[Moment] = field(default_factory=list)

    def stage(self, tokens: int, saved: set[int], logits: float) -> Stage:
        """The unit's computation per token, from totals of `tokens` tokens.

        `saved` are the numbers of the storages that autograd saves, `logits` the elements of the
        logits.
        """
        kernels, moved = fused_cost(self.elementwise, saved)

        def front(moments: list[Moment]) -> tuple[Moment, ...]:
            per_token = [
                m._replace(
                    activation_bytes=m.activation_bytes / tokens, logit_bytes=m.logit_bytes / tokens
                )
                for m in moments
            ]
            return prune(per_token) or (NOTHING,)

        return Stage(
            matmul_flops=self.matmul_flops / tokens,
            attention_flops=self.attention_flops / tokens,
            attention_span=self.attention_span,
            head_dim=self.head_dim or 128,
            elementwise_bytes=moved / tokens,
            fused_bytes=moved / tokens,
            kernels=self.kernels + kernels,
            products=self.matmuls,
            product_width=mean_width(self.widths),
            grouped_flops=self.grouped_flops / tokens,
            routed=self.grouped_rows / tokens,
            experts=self.experts,
            logits=logits / tokens if self.matmuls else 0.0,
            gradient_flops=self.gradient_flops / tokens,
            kept=self.kept(tokens),
            forward=front(self.forward),
            forward_unsaved=front(self.unsaved),
            backward=front(self.backward),
        )

    def kept(self, tokens: int) -> dict[Policy, Kept]:
        """Bytes kept and FLOPs recomputed per token under each policy; zeros without a backward."""
        if not self.saved_bytes:
            return {policy: Kept(activation_bytes=0.0) for policy in POLICIES}
        again = self.matmul_flops_at_last_save
        return {
            "none": Kept(
                activation_bytes=self.saved_bytes / tokens,
                logit_bytes=self.saved_logit_bytes / tokens,
            ),
            "selective": Kept(
                activation_bytes=(self.input_bytes + self.chosen_bytes) / tokens,
                recomputed_matmul_flops=(again - self.chosen_matmul_flops_at_last_save) / tokens,
                unread_bytes=(self.chosen_bytes - self.chosen_read_bytes) / tokens,
            ),
            "full": Kept(
                activation_bytes=self.input_bytes / tokens,
                recomputed_matmul_flops=again / tokens,
                recomputed_attention_flops=self.attention_flops_at_last_save / tokens,
            ),
        }
