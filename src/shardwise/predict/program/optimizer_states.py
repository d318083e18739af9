"""Bytes of optimizer states per device of each configuration, by the optimizers' formulas."""

from __future__ import annotations

from collections import Counter

import numpy as np

from shardwise.predict.configurations import Configurations, Floats
from shardwise.spec.optimizer import Optimizer, Shard, state_bytes
from shardwise.units.unit import ModelUnits, Parameter, Unit


def optimizer_state_bytes(units: ModelUnits, c: Configurations, optimizer: Optimizer) -> Floats:
    """Bytes of optimizer states on rank 0, which holds the most, for each configuration.

    Rows differ in how many devices divide a parameter, along which dimension, and in the dtype
    that is updated; each combination is computed once.
    """
    decides = np.stack([c.shard, c.expert_shard, c.reshard_group > 0, c.update_bytes], axis=1)
    found, row = np.unique(decides, axis=0, return_inverse=True)
    counted = Counter(units.units)
    totals = [
        sum(
            times
            * _group_bytes(
                group,
                optimizer,
                int(expert_shard if group.of_experts else shard),
                bool(along_rows),
                int(itemsize),
                in_block=unit is not units.root,
            )
            for unit, times in counted.items()
            for group in unit.groups
        )
        for shard, expert_shard, along_rows, itemsize in found
    ]
    return np.asarray(totals, dtype=float)[row.ravel()]


def _group_bytes(
    group: Unit,
    optimizer: Optimizer,
    shard: int,
    along_rows: bool,
    itemsize: int,
    *,
    in_block: bool,
) -> int:
    """Bytes of optimizer states of one parameter group on rank 0 of `shard` devices."""
    placed = group.along_rows if along_rows else group
    return sum(
        state_bytes(optimizer, shard_of(parameter, shard, in_block), itemsize)
        for parameter in placed.trained
    )


def shard_of(parameter: Parameter, shard: int, in_block: bool = True) -> Shard:
    """Shape and elements per rank of a parameter that FSDP2 shards over `shard` devices."""
    if not parameter.shape:
        return Shard((), (1, 1), in_block)
    dim = parameter.sharded_dim(shard)
    rows = parameter.shape[dim]
    most = -(-rows // shard)
    least = max(0, rows - (shard - 1) * most)
    each = parameter.numel // max(1, rows)
    shape = (*parameter.shape[:dim], most, *parameter.shape[dim + 1 :])
    return Shard(shape, (most * each, least * each), in_block)
