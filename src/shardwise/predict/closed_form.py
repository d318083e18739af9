"""Sharded training in closed form: what memory and bandwidth allow, before any schedule.

A model is `layers` equal blocks of 12·hidden² parameters; embeddings and head are left out. A step
is two races, each won by the slower: the forward against the passes of the whole model over the
network in it, the backward against its own. Simulations are judged against these figures; they
are not estimates of a run.

FLOPs follow the non-causal convention: attention counts every query against every key, which adds
4·hidden·seq_len to the 24·hidden² a token takes in a block's forward.

Every argument may be an array; arrays broadcast. Sizes are bytes, rates are per second and per
device.

Sources, by the names that functions give them:

- ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054: states by stage, volume of communication
- FSDP: Zhao et al. 2023, arXiv 2304.11277: gathered units, overlap, order of collectives
- Korthikanti: Korthikanti et al. 2022, arXiv 2205.05198: activations, FLOPs, HFU
- Wang: Wang et al. 2025, arXiv 2504.03655: memory and bandwidth bound efficiency together. Its
  formulas are reconstructed from its results, not copied.

docs/literature.md compares their published figures with what is predicted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = float | npt.NDArray[Any]
# Of ZeRO; 0 is plain data parallelism.
ZeroStage = Literal[0, 1, 2, 3]

# Bytes per token and unit of width that a block keeps for its backward with fused attention, in
# 16-bit precision: Korthikanti, section 4.1, equation 1 without the term of the scores.
BLOCK_ACTIVATION_BYTES = 34.0
# Whole units beside the shards: the one at work, the one gathered ahead (FSDP, section 3.4.2: two
# gathers at once), and gradients.
TRANSIENT_UNITS = 3
# fp32 master and two moments, in elements of the 16-bit compute dtype: ZeRO, section 3.1, K = 12.
OPTIMIZER_ELEMENTS = 6


class Shape(NamedTuple):
    """A model, as far as the closed form tells models apart."""

    layers: int
    hidden: int
    seq_len: int
    itemsize: int = 2

    @property
    def parameters(self) -> int:
        return self.layers * block_parameters(self.hidden)


class Machine(NamedTuple):
    """The devices a model is sharded over."""

    devices: int
    memory_bytes: float
    bandwidth: float
    peak_flops: float
    # The best share of the peak that kernels reach.
    efficiency: float = 1.0
    hop_s: float = 0.0


# ---- memory ---------------------------------------------------------------------------------


def block_parameters(hidden: int) -> int:
    """Four attention matrices, and two of an MLP four times as wide: Korthikanti, appendix A."""
    return 12 * hidden**2


def state_bytes(
    parameters: Numbers, devices: Numbers, stage: ZeroStage, itemsize: int = 2
) -> Numbers:
    """Parameters, gradients and Adam's state on one device; each stage shards one more of them.

    ZeRO, sections 5.1 to 5.3: 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes.
    """
    sizes = (1, 1, OPTIMIZER_ELEMENTS)
    whole = sum(sizes[: 3 - stage])
    return parameters * itemsize * (whole + (sum(sizes) - whole) / devices)


def least_state_bytes(parameters: Numbers, devices: Numbers, itemsize: int = 2) -> Numbers:
    """Master parameters and moments alone: what `fully_shard` holds beside all activations.

    It casts parameters as it gathers them, and the gradients of a step's first micro-batch come as
    its activations go. ZeRO, section 3.1 without parameters and gradients.
    """
    return parameters * itemsize * OPTIMIZER_ELEMENTS / devices


def transient_bytes(hidden: int, itemsize: int = 2, units: float = TRANSIENT_UNITS) -> float:
    """Blocks that are whole while they are at work: FSDP, section 3.2.1, the largest unit."""
    return units * block_parameters(hidden) * itemsize


def free_bytes(shape: Shape, devices: Numbers, memory_bytes: Numbers, stage: ZeroStage) -> Numbers:
    """What state and transient units leave for activations (Wang); negative: out of memory."""
    state = state_bytes(shape.parameters, devices, stage, shape.itemsize)
    return memory_bytes - state - transient_bytes(shape.hidden, shape.itemsize)


def activation_bytes(shape: Shape, tokens: Numbers, kept: Numbers) -> Numbers:
    """The share `kept` of what blocks save, block inputs for the rest, and one block recomputed.

    Korthikanti, section 4.1 and table 2: 34·s·b·h bytes, or 2·s·b·h with full recompute.
    """
    saved = BLOCK_ACTIVATION_BYTES * shape.hidden
    entry = float(shape.hidden * shape.itemsize)
    recomputed = np.where(np.asarray(kept) < 1, saved, 0.0)
    per_token: Numbers = shape.layers * ((1 - kept) * entry + kept * saved) + recomputed
    return tokens * per_token


def most_tokens(free: Numbers, shape: Shape) -> Numbers:
    """Tokens of one device that fill `free` bytes with nothing but the inputs of blocks (Wang)."""
    return free / (shape.layers * shape.hidden * shape.itemsize)


# ---- network --------------------------------------------------------------------------------


def transfer_s(
    size: Numbers,
    devices: Numbers,
    bandwidth: Numbers,
    messages: int = 1,
    hop_s: Numbers = 0.0,
) -> Numbers:
    """One pass of `size` bytes around a ring: all-gather or reduce-scatter, in `messages` calls.

    A device sends (N - 1)/N of it: FSDP, section 3.2.2.
    """
    # Written so that infinitely many devices are a number too.
    hops = 0.0 if np.all(np.equal(hop_s, 0.0)) else messages * (devices - 1) * hop_s
    return size * (1 - 1 / devices) / bandwidth + hops


class Passes(NamedTuple):
    """Passes of the whole model that race with the forward and with the backward."""

    forward: int
    backward: int


def passes(stage: ZeroStage, separate: bool = False) -> Passes:
    """With `separate` groups, gathers and reduce-scatters of the backward run side by side.

    ZeRO, section 7: two passes of data parallelism, two of stages 1 and 2, three of stage 3. One
    group runs them one after the other: FSDP, section 3.3.2.
    """
    if stage == 0:
        return Passes(forward=0, backward=2)
    if stage == 3 and not separate:
        return Passes(forward=1, backward=2)
    return Passes(forward=1, backward=1)


# ---- compute --------------------------------------------------------------------------------


def forward_flops(shape: Shape) -> float:
    """FLOPs per token of a forward, attention not causal: 24·L·H²·(1 + l/6H).

    Korthikanti, appendix A, equation 7 without the head.
    """
    return 2.0 * shape.parameters + 4.0 * shape.layers * shape.hidden * shape.seq_len


def compute_s(tokens: Numbers, flops_per_token: Numbers, machine: Machine) -> Numbers:
    """Seconds at the best share of the peak that kernels reach (Wang)."""
    return tokens * flops_per_token / (machine.efficiency * machine.peak_flops)


def step_s(forward_s: Numbers, kept: Numbers, pass_s: Numbers, moved: Passes) -> Numbers:
    """Two races: the backward computes twice the forward, and again what was not kept.

    Compute and communication overlap: FSDP, section 3.3.1. The sum of two maxima: Wang.
    """
    forward = np.maximum(forward_s, moved.forward * pass_s)
    backward = np.maximum((3.0 - kept) * forward_s, moved.backward * pass_s)
    total: Numbers = forward + backward
    return total


# ---- efficiency -----------------------------------------------------------------------------


def mfu(tokens_per_s: Numbers, flops_per_token: Numbers, peak_flops: Numbers) -> Numbers:
    """Of the peak, what forward and backward need: Korthikanti, section 6.3."""
    return 3.0 * flops_per_token * tokens_per_s / peak_flops


def hfu(
    tokens_per_s: Numbers, flops_per_token: Numbers, peak_flops: Numbers, kept: Numbers
) -> Numbers:
    """Of the peak, what is computed: recomputation too. Korthikanti, section 6.3."""
    return (4.0 - kept) * flops_per_token * tokens_per_s / peak_flops


def bandwidth_ceiling(
    tokens: Numbers, flops_per_token: Numbers, pass_s: Numbers, peak_flops: Numbers
) -> Numbers:
    """MFU that `tokens` per device and step cannot exceed, in three passes of the model (Wang)."""
    return mfu(tokens / (3.0 * pass_s), flops_per_token, peak_flops)


def memory_ceiling(
    shape: Shape,
    free: Numbers,
    bandwidth: Numbers,
    peak_flops: Numbers,
    devices: Numbers = np.inf,
) -> Numbers:
    """MFU that no batch exceeds: 2(1 + l/6H)·free·bandwidth / (L·H·Q²·peak). The result of Wang.

    Above 1, neither memory nor network is the limit. A ring of few devices sends less than the
    whole model, which raises the ceiling by devices / (devices - 1). `bandwidth` is that of the
    ring: where the devices of a node send through all its ports together, the sum of these.

    No run exceeds it where `free` is memory without `least_state_bytes`. With `free_bytes`, which
    counts all state as if it were held beside all activations, a step of one micro-batch may.
    """
    pass_s = transfer_s(shape.parameters * shape.itemsize, devices, bandwidth)
    return bandwidth_ceiling(most_tokens(free, shape), forward_flops(shape), pass_s, peak_flops)


def hiding_bandwidth(shape: Shape, tokens: Numbers, machine: Machine) -> Numbers:
    """The bandwidth from which on a forward hides its gathers, however many the devices (Wang)."""
    return shape.parameters * shape.itemsize / compute_s(tokens, forward_flops(shape), machine)


# ---- search ---------------------------------------------------------------------------------

BATCHES = (1, 2, 4, 8, 16, 32, 64)
KEPT_SHARES = tuple(share / 20 for share in range(21))
STAGES: tuple[ZeroStage, ...] = (3, 2)


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The setting with the highest MFU, and what it reaches."""

    stage: ZeroStage
    kept: float
    batch: int
    step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    # Memory that nothing uses.
    spare_bytes: float
    bound_by: Literal["compute", "bandwidth"]


def best(
    shape: Shape,
    machine: Machine,
    stages: tuple[ZeroStage, ...] = STAGES,
    kept_shares: tuple[float, ...] = KEPT_SHARES,
    batches: tuple[int, ...] = BATCHES,
    separate: bool = False,
) -> Optimum | None:
    """Try every setting and keep the best that fits, as Wang does; None where none does.

    Of equals the first is kept: stages in the order given, the smallest kept share and batch.
    """
    kept, batch = np.meshgrid(np.asarray(kept_shares), np.asarray(batches), indexing="ij")
    tokens = batch * float(shape.seq_len)
    flops = forward_flops(shape)
    forward = compute_s(tokens, flops, machine)
    pass_s = transfer_s(
        shape.parameters * shape.itemsize,
        machine.devices,
        machine.bandwidth,
        shape.layers,
        machine.hop_s,
    )
    found: Optimum | None = None
    for stage in stages:
        free = free_bytes(shape, machine.devices, machine.memory_bytes, stage)
        spare = np.asarray(free - activation_bytes(shape, tokens, kept))
        step = np.asarray(step_s(forward, kept, pass_s, passes(stage, separate)))
        rate = tokens / step
        reached = np.where(spare >= 0, mfu(rate, flops, machine.peak_flops), -np.inf)
        at = np.unravel_index(int(reached.argmax()), reached.shape)
        if spare[at] < 0 or (found is not None and reached[at] <= found.mfu):
            continue
        computing = np.asarray((4.0 - kept) * forward)[at]
        found = Optimum(
            stage=stage,
            kept=float(kept[at]),
            batch=int(batch[at]),
            step_s=float(step[at]),
            tokens_per_s=float(rate[at]),
            mfu=float(reached[at]),
            hfu=float(np.asarray(hfu(rate, flops, machine.peak_flops, kept))[at]),
            spare_bytes=float(spare[at]),
            bound_by="bandwidth" if step[at] > computing * (1 + 1e-12) else "compute",
        )
    return found
