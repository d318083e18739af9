"""Figures that papers derive, from the formulas of `shardwise.predict.closed_form`.

A row of the data file names one of `FORMULAS` and gives its arguments. Sizes are in units of 10^9.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.predict import closed_form
from shardwise.predict.closed_form import BLOCK_ACTIVATION_BYTES, Machine, Shape, ZeroStage

# What docs/concepts/why.md assumes of an A100-40GB: a tenth of the memory left aside, kernels at
# 75 % of the peak.
A100_PEAK, MEMORY, EFFICIENCY = 312e12, 0.9 * 40e9, 0.75
GBPS = 1e9 / 8
STAGES: dict[int, ZeroStage] = {0: 0, 1: 1, 2: 2, 3: 3}


def states(parameters: float, devices: float, stage: float) -> float:
    """GB of parameters, gradients and Adam's states on a device."""
    return float(closed_form.state_bytes(parameters, devices, STAGES[int(stage)])) / 1e9


def largest_model(memory: float, devices: float, stage: float) -> float:
    """Billions of parameters whose states fill `memory` bytes of a device."""
    return memory / float(closed_form.state_bytes(1.0, devices, STAGES[int(stage)])) / 1e9


def volume(stage: float) -> float:
    """Passes of the whole model over the network in a step."""
    return float(sum(closed_form.passes(STAGES[int(stage)])))


def activations(layers: float, hidden: float, tokens: float, kept: float) -> float:
    """GB of activations of a device where blocks keep the share `kept`."""
    shape = Shape(int(layers), int(hidden), seq_len=1024)
    return float(closed_form.activation_bytes(shape, tokens, kept)) / 1e9


def recomputed(kept: float) -> float:
    """FLOPs that are computed, over those of forward and backward."""
    return float(closed_form.hfu(1.0, 1.0, 1.0, kept) / closed_form.mfu(1.0, 1.0, 1.0))


def backward_share(kept: float) -> float:
    """Share of a step that is backward, in percent; the network is hidden."""
    whole = closed_form.step_s(1.0, kept, 0.0, closed_form.passes(3))
    return 100.0 * float((whole - 1.0) / whole)


def score_bytes(heads: float, seq_len: float, hidden: float) -> float:
    """Bytes of attention scores per token and unit of width that fused attention does not keep."""
    return 5.0 * heads * seq_len / hidden


def selective_saves(heads: float, seq_len: float, hidden: float) -> float:
    """Percent of a block's activations that are saved by recomputing attention scores."""
    scores = score_bytes(heads, seq_len, hidden)
    return 100.0 * scores / (scores + BLOCK_ACTIVATION_BYTES)


def selective_costs(layers: float, seq_len: float, hidden: float) -> float:
    """Percent of FLOPs that are added by recomputing attention scores."""
    shape = Shape(int(layers), int(hidden), int(seq_len))
    scores = closed_form.forward_flops(shape) - 2.0 * shape.parameters
    return 100.0 * scores / (3.0 * closed_form.forward_flops(shape))


def divided_saves(heads: float, seq_len: float, hidden: float, tensor: float) -> float:
    """Activations of a block that tensor parallelism alone keeps, over those kept with sequences
    divided too and scores recomputed."""
    alone = 10.0 + (24.0 + score_bytes(heads, seq_len, hidden)) / tensor
    return alone / (BLOCK_ACTIVATION_BYTES / tensor)


def doubled_network(layers: float, hidden: float, devices: float) -> float:
    """Points of MFU that the best setting gains from 200 instead of 100 Gbps per device."""
    shape = Shape(int(layers), int(hidden), seq_len=2048)
    reached = []
    for gbps in (200, 100):
        machine = Machine(int(devices), MEMORY, gbps * GBPS, A100_PEAK, EFFICIENCY)
        best = closed_form.best(shape, machine)
        assert best is not None
        reached.append(best.mfu)
    return 100.0 * (reached[0] - reached[1])


FORMULAS: dict[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        states, largest_model, volume, activations, recomputed, backward_share, selective_saves,
        selective_costs, divided_saves, doubled_network,
    )
}  # fmt: skip
