"""Floating-point operations of one optimizer step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Configurations, Floats, Ints
from shardwise.spec.strategy import blocks_of_share
from shardwise.units.unit import ModelUnits

# Said wherever a number depends on it.
MFU_CONVENTION = (
    "3 x forward FLOPs (matmuls and full attention scores, embedding lookup excluded) over the "
    "dense peak of the compute dtype; recomputation not counted"
)


class Work(NamedTuple):
    """FLOPs of one step over the whole cluster; `hardware` adds what recomputation repeats."""

    tokens: Floats
    model_flops: Floats
    hardware_flops: Floats


def predict_work(units: ModelUnits, c: Configurations) -> Work:
    """A backward costs twice its forward; recomputation adds what its policy runs again."""
    devices = c.shard * c.replicate
    tokens = c.micro_batch * c.accumulate * devices * float(units.seq_len)
    forward = units.forward_flops()
    count = len(units.blocks)
    full = np.asarray([b.stage.recomputed_flops("full") for b in units.blocks])
    selective = np.asarray([b.stage.recomputed_flops("selective") for b in units.blocks])
    recomputed = np.arange(count)[None, :] < recomputed_blocks(c, count)[:, None]
    again = np.where(recomputed, full, np.where(c.selective[:, None], selective, 0.0)).sum(axis=1)
    return Work(
        tokens=tokens,
        model_flops=3.0 * forward * tokens,
        hardware_flops=(3.0 * forward + again) * tokens,
    )


def recomputed_blocks(c: Configurations, count: int) -> Ints:
    """How many blocks, from the first on, recompute everything."""
    blocks: Ints = blocks_of_share(c.full_recompute, count).astype(np.int64)
    return blocks
