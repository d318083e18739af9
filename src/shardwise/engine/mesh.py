"""The device mesh of a strategy: shard inside, replicate across."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

REPLICATE, SHARD = "replicate", "shard"


def resolve_for_world(strategy: Strategy) -> Strategy:
    """The strategy with its degrees decided for the processes that are running."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return strategy.resolve(world, min(per_node, world))


def make_mesh(strategy: Strategy, device_type: str) -> DeviceMesh | None:
    """A mesh named by its axes: ("replicate", "shard"), one of the two, or none for `single`."""
    if strategy.kind == "single":
        return None
    shard, replicate = strategy.shard or 1, strategy.replicate or 1
    world = dist.get_world_size()
    if shard * replicate != world:
        raise SpecError(
            f"strategy: shard {shard} x replicate {replicate} = {shard * replicate} processes, but "
            f"{world} are running"
        )
    if strategy.kind == "ddp":
        return init_device_mesh(device_type, (replicate,), mesh_dim_names=(REPLICATE,))
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))
