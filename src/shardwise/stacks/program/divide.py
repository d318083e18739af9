"""Tensor and context parallelism: matrices by torch's styles, sequences by Ulysses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention

from shardwise.stacks.program.settings import (
    CONTEXT,
    HEAD_REPEATS,
    MODEL,
    QK_NORM,
    SEQUENCE_PARALLEL,
    TIED,
)


class Exchange(torch.autograd.Function):
    """Send a part of dimension `split` to every rank of a sequence; join theirs along `join`."""

    group: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: int, join: int) -> torch.Tensor:
        ctx.dimensions = split, join
        parts = torch.stack(x.chunk(CONTEXT, dim=split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=Exchange.group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        split, join = ctx.dimensions
        return Exchange.apply(gradient, join, split), None, None


def positions_of(ids: torch.Tensor) -> torch.Tensor:
    """The positions of these tokens in their sequences."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    if CONTEXT > 1:
        # Ranks have one part of every sequence each.
        positions += dist.get_rank(Exchange.group) * ids.shape[1]
    return positions


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention over whole sequences."""
    if HEAD_REPEATS > 1:
        # Every rank needs a key and value head of its own.
        k, v = (x.repeat_interleave(HEAD_REPEATS, dim=1) for x in (k, v))
    if CONTEXT > 1:
        # Ranks exchange tokens for heads, and back.
        q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))
    grouped = k.shape[1] < q.shape[1]
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if CONTEXT > 1:
        mixed = Exchange.apply(mixed, 2, 1)
    return mixed


def attend_in_transformers(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, which needs no mask."""
    return attend(q, k, v, scaling).transpose(1, 2), None


def divide_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Divide heads and the width of the MLP: two collectives forward, two backward."""
    between = Shard(1) if SEQUENCE_PARALLEL else Replicate()
    whole = Replicate()
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    if MODEL == "written":
        attention = PrepareModuleInput(
            input_layouts=(between, None, None),
            desired_input_layouts=(whole, None, None),
        )
    else:
        attention = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": whole},
        )
    plan: dict[str, ParallelStyle] = {
        "self_attn": attention,
        "mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=whole),
        **{f"self_attn.{name}_proj": column for name in "qkv"},
        "self_attn.o_proj": row,
        **{f"mlp.{name}_proj": column for name in ("gate", "up")},
        "mlp.down_proj": row,
    }
    if SEQUENCE_PARALLEL:
        norm = SequenceParallel()
        plan |= {"input_layernorm": norm, "post_attention_layernorm": norm}
    if QK_NORM:
        # Their gradients are summed over ranks, which have different heads.
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
    # Every rank has drawn the same weights: none are sent.
    parallelize_module(block, mesh, plan, src_data_rank=None)


def divide_ends(model: Any, mesh: DeviceMesh) -> None:
    """Divide the vocabulary of embedding and head; logits stay divided for the loss."""
    between = Shard(1) if SEQUENCE_PARALLEL else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if SEQUENCE_PARALLEL:
        plan |= {"model.norm": SequenceParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if TIED:
        # Divided one after the other they became two.
        model.lm_head.weight = model.model.embed_tokens.weight
