"""Seconds of compute on one device.

A matrix product takes its FLOPs at a share of the peak, plus a fixed time. Attention reaches its
share of the peak on long sequences only. Element-wise work runs at memory bandwidth. A pass takes
at least as long as the host needs to launch its kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.predict.rates import Coefficients, Hardware, with_attention
from shardwise.units.stage import Policy, Stage

# Head dimensions that attention kernels were measured with.
NARROW, WIDE = 64, 128


class _Pass(NamedTuple):
    """FLOPs and relative memory traffic per token of a forward, a backward or a recompute."""

    matmul_flops: float
    attention_flops: float
    # Memory traffic and kernel launches, as a multiple of the forward's.
    passes: float
    # Share of `Coefficients.head_bytes`, which the head moves beyond its element-wise operations.
    head: float
    backward: bool = False


class Parts(NamedTuple):
    """Seconds of a pass by kind of work; the host runs in parallel with the other three."""

    products: Floats | float
    attention: Floats
    elementwise: Floats | float
    host: Floats | float

    @property
    def seconds(self) -> Floats:
        device = self.products + self.attention + self.elementwise
        seconds: Floats = np.maximum(device, self.host)
        return seconds


def forward_s(stage: Stage, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    """Seconds of a forward of `tokens` tokens on one device."""
    return forward_parts(stage, tokens, h, k).seconds


def forward_parts(stage: Stage, tokens: Floats, h: Hardware, k: Coefficients) -> Parts:
    """Seconds of a forward of `tokens` tokens on one device, by kind of work."""
    done = _Pass(stage.matmul_flops, stage.attention_flops, 1.0, 1 / 3)
    return _parts(stage, done, tokens, h, k)


def backward_s(stage: Stage, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    """Seconds of a backward of `tokens` tokens on one device.

    An attention kernel's backward has two and a half times the FLOPs of its forward.
    """
    attention = 2.5 * stage.attention_flops
    done = _Pass(stage.backward_matmul_flops, attention, 2.0, 2 / 3, backward=True)
    return _parts(stage, done, tokens, h, k).seconds


def recompute_s(
    stage: Stage, policy: Policy, tokens: Floats, h: Hardware, k: Coefficients
) -> Floats:
    """Seconds that a recompute policy adds to a backward of `tokens` tokens on one device."""
    kept = stage.kept[policy]
    done = _Pass(kept.recomputed_matmul_flops, kept.recomputed_attention_flops, 1.0, 1 / 3)
    return _parts(stage, done, tokens, h, k).seconds


def fused_s(
    stage: Stage,
    flops: float,
    passes: float,
    tokens: Floats,
    moved: Floats | float,
    h: Hardware,
    k: Coefficients,
) -> Floats:
    """Seconds of a head with a fused loss: its products, and the other operations on hidden states.

    Args:
        stage: The computation of the root.
        flops: FLOPs per token of the products.
        passes: Memory traffic and launches of the other operations, as a multiple of the forward's.
        tokens: Tokens on one device.
        moved: Bytes that the fused kernel reads and writes beside the products.
        h: The rates of the device.
        k: The coefficients of the device.
    """
    parts = _parts(stage, _Pass(flops, 0.0, passes, 0.0), tokens, h, k)
    logits = k.elementwise_factor * passes * stage.logit_moved * tokens
    less = (logits - moved) / h.memory_bandwidth
    return parts._replace(elementwise=parts.elementwise - less).seconds


def _parts(stage: Stage, done: _Pass, tokens: Floats, h: Hardware, k: Coefficients) -> Parts:
    """Seconds of one pass of `tokens` tokens on one device, by kind of work."""
    fused = k.fused if stage.compiled else 0.0
    moved = done.passes * (fused * stage.fused_bytes + (1.0 - fused) * stage.elementwise_bytes)
    # Beyond what element-wise operations of the head read and write.
    moved = k.elementwise_factor * moved + done.head * k.head_bytes * stage.logits
    return Parts(
        _products(stage, done, tokens, h, k),
        _scores(stage, done, tokens, h, k),
        moved * tokens / h.memory_bandwidth,
        _host(stage, done, k),
    )


def _products(
    stage: Stage, done: _Pass, tokens: Floats, h: Hardware, k: Coefficients
) -> Floats | float:
    """Seconds of the matrix products of a pass, those of experts included."""
    if not np.any(done.matmul_flops):
        return 0.0
    flops = done.matmul_flops * tokens
    # The number of products is taken to grow with their FLOPs, relative to the forward.
    share = done.matmul_flops / np.maximum(stage.matmul_flops, 1e-9)
    fixed = np.where(flops > 0, k.matmul_half_s / k.matmul_efficiency, 0.0)
    products = flops / (h.peak_flops * k.matmul_efficiency)
    if stage.linear_dtype is not None:
        relative, cast_width = k.low_bits(stage.linear_dtype)
        products = products * relative * (1.0 + cast_width / stage.product_width)
    seconds: Floats = products + fixed + k.product_s * stage.products * share
    if np.any(stage.experts):
        # The grouped kernel of experts is slow with few tokens per expert; and tokens are sorted.
        each = np.maximum(tokens * stage.routed, 1e-9) / np.maximum(stage.experts, 1)
        grouped = stage.grouped_flops / np.maximum(stage.matmul_flops, 1e-9)
        seconds = seconds + products * grouped * k.grouped_half_tokens / each
        each_s = np.where(stage.by_library, k.library_routed_s, k.routed_s)
        seconds = seconds + each_s * stage.routed * tokens * done.passes
    return seconds


def _scores(stage: Stage, done: _Pass, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    """Seconds of the attention scores of a pass; a causal kernel does half the counted FLOPs."""
    k = with_attention(k, h, stage.attention)
    efficiency, half = k.attention_efficiency, k.attention_half_span
    if done.backward:
        efficiency, half = efficiency * k.attention_backward, half * k.attention_backward_span
    # np.clip takes ten times as long on a single number.
    width = np.minimum(np.maximum(stage.head_dim, NARROW), WIDE)
    narrow = np.log2(WIDE / width) / np.log2(WIDE / NARROW)
    efficiency = efficiency * k.narrow_heads**narrow
    slower = 1.0 + half / np.maximum(stage.attention_span, 1)
    seconds: Floats = 0.5 * done.attention_flops * tokens / (h.peak_flops * efficiency) * slower
    return seconds


def _host(stage: Stage, done: _Pass, k: Coefficients) -> Floats | float:
    """Seconds the host takes to launch the kernels of a pass; a faster device waits for it."""
    launches = stage.kernels * k.launch_s
    if stage.compiled:
        launches = launches * k.compiled_launch
    block = np.where(np.asarray(stage.attention_span) > 0, k.block_host_s, 0.0)
    seconds: Floats = done.passes * (launches + block)
    return seconds
