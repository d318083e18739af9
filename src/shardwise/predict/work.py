"""Floating-point operations of one optimizer step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Configurations, Floats
from shardwise.spec.recompute import blocks_of_share
from shardwise.units.unit import ModelUnits

# Shown wherever a number depends on this convention.
MFU_CONVENTION = (
    "FLOPs of forward and backward (3 x forward where all is trained; matmuls and full attention "
    "scores, embedding lookup excluded) over the dense peak of the compute dtype; recomputation "
    "not counted"
)


class Work(NamedTuple):
    """Tokens and FLOPs of one step over all devices; `hardware_flops` adds recomputation."""

    tokens: Floats
    model_flops: Floats
    hardware_flops: Floats


def model_flops_per_token(units: ModelUnits) -> float:
    """FLOPs per token of one forward and backward, without recomputation, over all devices.

    With a reference model also its forward.
    """
    forwards = 1 if units.reference is None else 2
    # Each device of a tensor group computes a part.
    forward, backward = units.forward_flops(), units.backward_flops()
    # Beyond the mean of devices: that of the device with the most tokens.
    beyond = 1.0 - 1.0 / units.division.routing
    for part in (part for block in units.single_blocks for part in block.stage.parts):
        if part.of_experts:
            forward -= beyond * part.forward_flops
            backward -= beyond * part.backward_flops
    return units.division.tensor * (forwards * forward + backward)


def predict_work(units: ModelUnits, c: Configurations) -> Work:
    """Tokens and FLOPs of one step for each configuration, summed over all devices."""
    tokens = c.micro_batch * c.accumulate * c.data_parallel * float(units.seq_len)
    once = model_flops_per_token(units)
    share = units.division.tensor
    blocks = units.single_blocks
    full = share * np.asarray([b.stage.recomputed_flops("full") for b in blocks])
    selective = share * np.asarray([b.stage.recomputed_flops("selective") for b in blocks])
    recomputed = recomputed_blocks(c, len(blocks))
    again = np.where(recomputed, full, np.where(c.selective[:, None], selective, 0.0)).sum(axis=1)
    return Work(
        tokens=tokens,
        model_flops=once * tokens,
        hardware_flops=(once + again) * tokens,
    )


def recomputed_blocks(c: Configurations, count: int) -> Bools:
    """Which of `count` blocks recompute everything (the first ones): a mask (rows, count).

    The share of recomputed blocks counts blocks, as the engine does, not units.
    """
    recomputed: Bools = np.arange(count) < blocks_of_share(c.full_recompute, count)[:, None]
    return recomputed


def sum_by_unit(per_block: Floats, units: ModelUnits) -> Floats:
    """Values by block (rows, blocks), summed to values by unit (rows, units)."""
    sizes = np.asarray([len(unit.blocks) for unit in units.blocks], dtype=np.int64)
    if len(sizes) == per_block.shape[1]:
        return per_block
    summed: Floats = np.add.reduceat(per_block, np.cumsum(sizes) - sizes, axis=1)
    return summed
