"""Sharded training in closed form: what memory and bandwidth allow, before any schedule.

A model is `layers` equal blocks of 12·hidden² parameters; embeddings and head are left out. A step
is a forward and a backward. Each takes as long as the slower of two things that overlap: its
compute, and its all-gathers and reduce-scatters of all parameters. Simulations are judged against
these figures; they are not estimates of a run.

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
# Stages of ZeRO; 0 is plain data parallelism.
ZeroStage = Literal[0, 1, 2, 3]

# Bytes per token and unit of width that a block keeps for its backward with fused attention, in
# 16-bit precision: Korthikanti, section 4.1, equation 1 without the term of the scores.
BLOCK_ACTIVATION_BYTES = 34.0
# Unsharded units held in addition to the shards: the unit being computed, the unit being
# prefetched (FSDP, section 3.4.2: two gathers at once), and one unit's gradients.
TRANSIENT_UNITS = 3
# fp32 master and two moments, in elements of the 16-bit compute dtype: ZeRO, section 3.1, K = 12.
OPTIMIZER_ELEMENTS = 6


class Shape(NamedTuple):
    """The properties of a model that the closed form uses."""

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
    """Number of parameters of one block: 12·hidden².

    Four attention matrices, and two of an MLP four times as wide: Korthikanti, appendix A.
    """
    return 12 * hidden**2


def state_bytes(
    parameters: Numbers, devices: Numbers, stage: ZeroStage, itemsize: int = 2
) -> Numbers:
    """Bytes of parameters, gradients and Adam states on one device.

    Each ZeRO stage shards one more of them. ZeRO, sections 5.1 to 5.3: 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and
    16Ψ/N bytes.
    """
    sizes = (1, 1, OPTIMIZER_ELEMENTS)
    whole = sum(sizes[: 3 - stage])
    return parameters * itemsize * (whole + (sum(sizes) - whole) / devices)


def least_state_bytes(parameters: Numbers, devices: Numbers, itemsize: int = 2) -> Numbers:
    """Bytes per device of the sharded master parameters and Adam moments alone.

    These are the states that `fully_shard` holds while all activations are alive: it casts
    parameters when it gathers them, and in a step's first micro-batch gradients appear as
    activations are freed. ZeRO, section 3.1 without parameters and gradients.
    """
    return parameters * itemsize * OPTIMIZER_ELEMENTS / devices


def transient_bytes(hidden: int, itemsize: int = 2, units: float = TRANSIENT_UNITS) -> float:
    """Bytes of `units` unsharded blocks, held while blocks compute: FSDP, section 3.2.1."""
    return units * block_parameters(hidden) * itemsize


def free_bytes(shape: Shape, devices: Numbers, memory_bytes: Numbers, stage: ZeroStage) -> Numbers:
    """Bytes per device left for activations (Wang); negative if the states alone do not fit."""
    state = state_bytes(shape.parameters, devices, stage, shape.itemsize)
    return memory_bytes - state - transient_bytes(shape.hidden, shape.itemsize)


def activation_bytes(shape: Shape, tokens: Numbers, kept: Numbers) -> Numbers:
    """Bytes of activations on one device for `tokens` tokens.

    `kept` is the share of blocks' activations that is saved, 0 to 1. For the rest only block inputs
    are saved, and one block at a time is recomputed. Korthikanti, section 4.1 and table 2:
    34·s·b·h bytes, or 2·s·b·h with full recompute.
    """
    saved = BLOCK_ACTIVATION_BYTES * shape.hidden
    entry = float(shape.hidden * shape.itemsize)
    recomputed = np.where(np.asarray(kept) < 1, saved, 0.0)
    per_token: Numbers = shape.layers * ((1 - kept) * entry + kept * saved) + recomputed
    return tokens * per_token


def most_tokens(free: Numbers, shape: Shape) -> Numbers:
    """Most tokens per device whose block inputs alone fit in `free` bytes (Wang)."""
    return free / (shape.layers * shape.hidden * shape.itemsize)


# ---- network --------------------------------------------------------------------------------


def transfer_s(
    size: Numbers,
    devices: Numbers,
    bandwidth: Numbers,
    messages: int = 1,
    hop_s: Numbers = 0.0,
) -> Numbers:
    """Seconds of ring all-gathers or reduce-scatters of `size` bytes in total, in `messages` calls.

    A device sends (N - 1)/N of the bytes: FSDP, section 3.2.2. `hop_s` is seconds per hop.
    """
    # Written so that an infinite number of devices gives a finite result.
    hops = 0.0 if np.all(np.equal(hop_s, 0.0)) else messages * (devices - 1) * hop_s
    return size * (1 - 1 / devices) / bandwidth + hops


class Passes(NamedTuple):
    """How often all parameters (or gradients) cross the network in the forward and the backward."""

    forward: int
    backward: int


def passes(stage: ZeroStage, separate: bool = False) -> Passes:
    """How often all parameters or gradients cross the network, by ZeRO stage.

    ZeRO, section 7: two passes of data parallelism, two of stages 1 and 2, three of stage 3. With
    `separate` process groups, the backward's all-gathers and reduce-scatters run at the same time
    and count once. One group runs them one after the other: FSDP, section 3.3.2.
    """
    if stage == 0:
        return Passes(forward=0, backward=2)
    if stage == 3 and not separate:
        return Passes(forward=1, backward=2)
    return Passes(forward=1, backward=1)


# ---- compute --------------------------------------------------------------------------------


def forward_flops(shape: Shape) -> float:
    """FLOPs per token of a forward, with non-causal attention: 24·L·H²·(1 + l/6H).

    Korthikanti, appendix A, equation 7 without the head.
    """
    return 2.0 * shape.parameters + 4.0 * shape.layers * shape.hidden * shape.seq_len


def compute_s(tokens: Numbers, flops_per_token: Numbers, machine: Machine) -> Numbers:
    """Seconds to compute `tokens` at the machine's efficiency, a share of the peak (Wang)."""
    return tokens * flops_per_token / (machine.efficiency * machine.peak_flops)


def step_s(forward_s: Numbers, kept: Numbers, pass_s: Numbers, moved: Passes) -> Numbers:
    """Seconds of a step: max(compute, communication) of the forward plus that of the backward.

    The backward computes twice the forward, and recomputes the share that was not `kept`. `pass_s`
    is seconds of one pass of the model over the network, `moved` the number of passes. Compute and
    communication overlap: FSDP, section 3.3.1. The sum of two maxima: Wang.
    """
    forward = np.maximum(forward_s, moved.forward * pass_s)
    backward = np.maximum((3.0 - kept) * forward_s, moved.backward * pass_s)
    total: Numbers = forward + backward
    return total


# ---- efficiency -----------------------------------------------------------------------------


def mfu(tokens_per_s: Numbers, flops_per_token: Numbers, peak_flops: Numbers) -> Numbers:
    """Model FLOPs utilization per device: forward and backward, without recomputation.

    Korthikanti, section 6.3. `tokens_per_s` is per device; `flops_per_token` is a forward's.
    """
    return 3.0 * flops_per_token * tokens_per_s / peak_flops


def hfu(
    tokens_per_s: Numbers, flops_per_token: Numbers, peak_flops: Numbers, kept: Numbers
) -> Numbers:
    """Hardware FLOPs utilization per device: MFU plus recomputation. Korthikanti, section 6.3."""
    return (4.0 - kept) * flops_per_token * tokens_per_s / peak_flops


def bandwidth_ceiling(
    tokens: Numbers, flops_per_token: Numbers, pass_s: Numbers, peak_flops: Numbers
) -> Numbers:
    """Highest MFU that the network allows for `tokens` per device and step (Wang).

    `pass_s` is seconds of one pass of all parameters over the network; a step has three.
    """
    return mfu(tokens / (3.0 * pass_s), flops_per_token, peak_flops)


def memory_ceiling(
    shape: Shape,
    free: Numbers,
    bandwidth: Numbers,
    peak_flops: Numbers,
    devices: Numbers = np.inf,
) -> Numbers:
    """Highest MFU at any batch size: 2(1 + l/6H)·free·bandwidth / (L·H·Q²·peak). Result of Wang.

    Above 1, neither memory nor network is the limit. A ring of few devices sends less than the
    whole model, which raises the ceiling by devices / (devices - 1). `bandwidth` is that of the
    ring: where the devices of a node send through all its ports together, the sum of these.

    No run exceeds it where `free` is memory without `least_state_bytes`. With `free_bytes`, which
    counts all state as if it were held beside all activations, a step of one micro-batch may.
    """
    pass_s = transfer_s(shape.parameters * shape.itemsize, devices, bandwidth)
    return bandwidth_ceiling(most_tokens(free, shape), forward_flops(shape), pass_s, peak_flops)


def hiding_bandwidth(shape: Shape, tokens: Numbers, machine: Machine) -> Numbers:
    """Bytes per second at which a forward hides its all-gathers on any number of devices (Wang)."""
    return shape.parameters * shape.itemsize / compute_s(tokens, forward_flops(shape), machine)


# ---- search ---------------------------------------------------------------------------------

BATCHES = (1, 2, 4, 8, 16, 32, 64)
KEPT_SHARES = tuple(share / 20 for share in range(21))
STAGES: tuple[ZeroStage, ...] = (3, 2)


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The setting with the highest MFU, and its predicted figures per device."""

    stage: ZeroStage
    kept: float
    batch: int
    step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    # Bytes per device left unused.
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
    """The setting with the highest MFU that fits in memory, as Wang searches; None if none fits.

    Ties go to the first: stages in the order given, then the smallest kept share and batch.
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
