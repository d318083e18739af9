"""Calls and bytes of every collective of one optimizer step.

`bytes` follow one rule: the whole group's message (all-gather output, reduce-scatter input,
all-reduce tensor), summed over the calls, padding included as FSDP2 pads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Configurations, Ints
from shardwise.units.unit import ModelUnits

# DDP's own buckets: a small first one that leaves early, then larger ones. A size that is asked for
# holds for all.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


class Collective(NamedTuple):
    """One kind of collective on one axis of the mesh, per configuration."""

    op: str
    group: str
    calls: Ints
    bytes: Ints


def predict_traffic(units: ModelUnits, c: Configurations) -> list[Collective]:
    """What one rank takes part in, by operation and by group of the device mesh."""
    padded = padded_rows(units, c.shard)
    count = len(units.blocks) + 1
    whole, blocks = padded.sum(axis=1), padded[:, :-1].sum(axis=1)
    k = c.accumulate
    gathers = c.sharded & (c.shard > 1)

    # Forward: every unit, unless the previous micro-batch left the parameters gathered.
    forward_passes = np.where(c.reshard_backward, k, 1)
    # Backward: every unit but the root, which is not resharded after its forward.
    backward_passes = np.where(c.reshard_forward, k, 0)
    whole_group = np.where(c.reshard_group > 0, 0, backward_passes)
    small_group = np.where(c.reshard_group > 0, backward_passes, 0)
    scatters = np.where(c.shard_sync_every, k, 1)
    reductions = np.where(c.replicate_sync_every, k, 1)
    hybrid = c.sharded & (c.replicate > 1)

    found = [
        Collective(
            op="all_gather",
            group="shard",
            calls=np.where(gathers, forward_passes * count + whole_group * (count - 1), 0),
            bytes=np.where(gathers, forward_passes * whole + whole_group * blocks, 0)
            * c.param_bytes,
        ),
        Collective(
            op="all_gather",
            group="reshard",
            calls=np.where(gathers, small_group * (count - 1), 0),
            bytes=np.where(gathers, small_group * blocks, 0) * c.param_bytes,
        ),
        Collective(
            op="reduce_scatter",
            group="shard",
            calls=np.where(gathers, scatters * count, 0),
            bytes=np.where(gathers, scatters * whole, 0) * c.reduce_bytes,
        ),
        Collective(
            op="all_reduce",
            group="replicate",
            calls=np.where(hybrid, reductions * count, 0),
            bytes=np.where(hybrid, reductions * whole // c.shard, 0) * c.reduce_bytes,
        ),
    ]
    ddp = c.ddp & (c.replicate > 1)
    buckets = np.asarray(
        [
            ddp_buckets(units, int(master), float(cap)) if used else 0
            for master, cap, used in zip(c.master_bytes, c.bucket_bytes, ddp, strict=True)
        ],
        dtype=np.int64,
    )
    found.append(
        Collective(
            op="all_reduce",
            group="replicate",
            calls=np.where(ddp, reductions * buckets, 0),
            bytes=np.where(ddp, reductions * units.numel, 0) * c.reduce_bytes,
        )
    )
    return [collective for collective in found if collective.calls.any()]


def padded_rows(units: ModelUnits, shard: Ints) -> Ints:
    """Padded elements of each unit (columns, the root last) for each row's degree."""
    degrees = sorted(set(shard.tolist()))
    table = np.asarray([units_padded(units, degree) for degree in degrees], dtype=np.int64)
    rows: Ints = table[np.searchsorted(degrees, shard)]
    return rows


@lru_cache(maxsize=4096)
def units_padded(units: ModelUnits, shard: int) -> tuple[int, ...]:
    """Padded elements of each unit, blocks in order and the root last."""
    kinds = {id(block): block for block in units.blocks}
    sizes = {key: block.padded_numel(shard) for key, block in kinds.items()}
    return (*(sizes[id(block)] for block in units.blocks), units.root.padded_numel(shard))


@lru_cache(maxsize=256)
def ddp_buckets(units: ModelUnits, itemsize: int, cap_bytes: float = 0.0) -> int:
    """How many buckets DDP fills, walking the gradients in the order the backward makes them."""
    first, others = (cap_bytes, cap_bytes) if cap_bytes else (FIRST_BUCKET_BYTES, BUCKET_BYTES)
    buckets, filled = 0, 0.0
    for parameter in reversed(units.in_order()):
        filled += parameter.numel * itemsize
        if filled >= (first if buckets == 0 else others):
            buckets, filled = buckets + 1, 0.0
    return buckets + (filled > 0)
