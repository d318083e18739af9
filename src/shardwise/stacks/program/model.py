"""Llama, Mistral, Qwen2 and Qwen3 in torch alone.

Operations and their order are those of transformers with fused attention, so that results are equal
bit by bit; modules are named as in its checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

from shardwise.stacks.program.divide import attend, positions_of
from shardwise.stacks.program.loss import ChunkedLoss
from shardwise.stacks.program.seeds import seed_of
from shardwise.stacks.program.settings import (
    ACTIVATION,
    CHUNKED_LOSS,
    CONTEXT,
    DEVICE,
    FFN,
    GROUPED,
    HAS_HEAD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INITIAL_STD,
    KIND,
    KV_HEADS,
    LAYERS,
    MLP_BIAS,
    NORM_EPSILON,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    ROPE_THETA,
    TENSOR,
    UPCASTS,
    VOCAB,
)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x.float()
        high = high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + NORM_EPSILON)
        return self.weight * high.to(x.dtype)


def rotary_tables(ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position's angles, both halves of a head alike."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float, device=ids.device) / HEAD_DIM
    if CONTEXT > 1:
        positions = positions_of(ids)
    else:
        positions = torch.arange(ids.shape[1], device=ids.device)
    angles = positions[:, None].float() * (1.0 / ROPE_THETA**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=QKV_BIAS)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=QKV_BIAS)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=QKV_BIAS)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=OUTPUT_BIAS)
        if QK_NORM:
            self.q_norm = RMSNorm(HEAD_DIM)
            self.k_norm = RMSNorm(HEAD_DIM)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:-1], -1, HEAD_DIM)
        q, k = self.q_proj(x).view(heads), self.k_proj(x).view(heads)
        if QK_NORM:
            q, k = self.q_norm(q), self.k_norm(k)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        if CONTEXT > 1:
            mixed = attend(q, k, v)
        else:
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=GROUPED)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=MLP_BIAS)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=MLP_BIAS)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=MLP_BIAS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ACTIVATION(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.post_attention_layernorm = RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Tokens to their summed loss. Parameters are named as in checkpoints of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCAB, HIDDEN),
                "layers": nn.ModuleList(Block() for _ in range(LAYERS)),
                "norm": RMSNorm(HIDDEN),
            }
        )
        if HAS_HEAD:
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = rotary_tables(ids, x.dtype)
        for block in self.model.layers:
            x = block(x, cos, sin)
        x = self.model.norm(x)
        if CHUNKED_LOSS:
            weight = self.lm_head.weight if HAS_HEAD else self.model.embed_tokens.weight
            return ChunkedLoss.apply(partial(linear, weight=weight), x, targets, weight)
        logits = self.lm_head(x) if HAS_HEAD else linear(x, self.model.embed_tokens.weight)
        if UPCASTS:
            logits = logits.float()
        loss: Any = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        if TENSOR > 1:
            # Every rank of a tensor group has it.
            loss = loss.full_tensor()
        return loss


def initialize(unit: nn.Module, prefix: str = "") -> None:
    """Initialise each layer from a seed of its own."""
    for name, layer in unit.named_modules(prefix=prefix):
        if KIND == "sharded":
            # Allocated only now: a process never holds more than one unsharded unit.
            if not any(parameter.is_meta for parameter in layer.parameters(recurse=False)):
                continue
            layer.to_empty(device=DEVICE, recurse=False)
        torch.manual_seed(seed_of(name))
        if isinstance(layer, RMSNorm):
            nn.init.ones_(layer.weight)
        elif isinstance(layer, (nn.Linear, nn.Embedding)):
            nn.init.normal_(layer.weight, std=INITIAL_STD)
        if QKV_BIAS or OUTPUT_BIAS or MLP_BIAS:
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)
