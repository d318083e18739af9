"""The process group of a run and its device mesh: (replicate, shard)."""

from __future__ import annotations

import atexit
import gc
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.engine.device import backends, is_accelerator, use
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

# Time in which a thread on a busy machine releases its tensors.
_SETTLE_S = 0.1
REPLICATE, SHARD = "replicate", "shard"


def world() -> tuple[int, int]:
    """(rank of this process, number of processes)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def processes_per_node() -> int:
    """Number of processes on this machine."""
    _, size = world()
    return min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def join(device: torch.device) -> None:
    """Join the process group that a launcher describes in the environment, if there is one."""
    use(device)
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    # Gloo's threads outlive their group, because DTensor keeps every mesh. A thread that still
    # holds tensors of the last collective when the interpreter ends would abort the process.
    atexit.register(time.sleep, _SETTLE_S)
    backend = backends(device.type)
    device_id = device if is_accelerator(device) else None
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if not attempt or not one_machine:
        dist.init_process_group(backend, device_id=device_id)
        return
    # torchrun keeps one store for all attempts, with the addresses of dead processes. Several
    # machines count attempts independently, so the prefix is used on one machine only.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(
        backend,
        device_id=device_id,
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def leave() -> None:
    """Leave the process group, if there is one; call it when no model is referenced any more."""
    if dist.is_initialized():
        # A model that outlives its process group can hang in the group's destructor.
        gc.collect()
        dist.destroy_process_group()


def resolve_for_world(strategy: Strategy) -> Strategy:
    """The strategy with shard and replicate sizes for the running processes."""
    return strategy.resolve(world()[1], processes_per_node())


def make_mesh(strategy: Strategy, device_type: str) -> DeviceMesh | None:
    """A mesh named by its axes: ("replicate", "shard"), one of the two, or none for `single`."""
    if strategy.kind == "single":
        return None
    shard, replicate = strategy.shard or 1, strategy.replicate or 1
    _, size = world()
    if shard * replicate != size:
        raise SpecError(
            f"strategy: shard {shard} x replicate {replicate} = {shard * replicate} processes, but "
            f"{size} are running"
        )
    if not dist.is_initialized():
        # One process without a launcher: a group of its own.
        store = dist.HashStore()
        dist.init_process_group(backends(device_type), store=store, rank=0, world_size=1)
    if strategy.kind == "ddp":
        return init_device_mesh(device_type, (replicate,), mesh_dim_names=(REPLICATE,))
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))
