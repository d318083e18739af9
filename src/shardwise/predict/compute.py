"""Seconds of what a device computes.

A matmul's efficiency rises with its size, element-wise work runs at memory bandwidth, and nothing
is faster than the launches it needs.
"""

from __future__ import annotations

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.units.unit import Policy, Stage

# The longest sequence of the fitted runs, which are of 2023, and the length from which on runs with
# newer attention kernels were measured.
SHORT, LONG = 2**16, 2**19


def forward_s(stage: Stage, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    """A forward of `tokens` of one device."""
    return _seconds(
        stage.matmul_flops * tokens,
        stage.attention_flops * tokens,
        _moved(stage, k) * tokens,
        stage.kernels,
        h,
        _at_length(stage, k),
    )


def backward_s(stage: Stage, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    """An attention kernel's backward does two and a half times its forward."""
    return _seconds(
        stage.backward_matmul_flops * tokens,
        2.5 * stage.attention_flops * tokens,
        2.0 * _moved(stage, k) * tokens,
        2.0 * stage.kernels,
        h,
        _at_length(stage, k),
    )


def recompute_s(
    stage: Stage, policy: Policy, tokens: Floats, h: Hardware, k: Coefficients
) -> Floats:
    """What a recompute policy adds to a backward."""
    kept = stage.kept[policy]
    return _seconds(
        kept.recomputed_matmul_flops * tokens,
        kept.recomputed_attention_flops * tokens,
        _moved(stage, k) * tokens,
        stage.kernels,
        h,
        _at_length(stage, k),
    )


def _at_length(stage: Stage, k: Coefficients) -> Coefficients:
    """Attention kernels that run longer sequences than were fitted are newer, and faster."""
    longer = np.log2(np.maximum(stage.attention_span, SHORT) / SHORT)
    way = np.minimum(1.0, longer / np.log2(LONG / SHORT))
    return k._replace(attention_efficiency=k.attention_efficiency * k.long_attention**way)


def _moved(stage: Stage, k: Coefficients) -> float:
    """Bytes per token that element-wise operations of a forward move; a compiler fuses them."""
    return stage.elementwise_bytes * (k.compiled_elementwise if stage.compiled else 1.0)


def _seconds(
    matmul: Floats, attention: Floats, moved: Floats, kernels: float, h: Hardware, k: Coefficients
) -> Floats:
    efficiency = k.matmul_efficiency * matmul / (matmul + k.matmul_half_s * h.peak_flops)
    product = np.where(matmul > 0, matmul / (h.peak_flops * np.maximum(efficiency, 1e-9)), 0.0)
    # A causal kernel does half of what is counted.
    scores = 0.5 * attention / (h.peak_flops * k.attention_efficiency)
    rest = k.elementwise_factor * moved / h.memory_bandwidth
    seconds: Floats = np.maximum(product + scores + rest, kernels * k.launch_s)
    return seconds
