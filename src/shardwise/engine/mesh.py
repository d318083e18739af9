"""The process group of a run, its device mesh, and the coordinates of each process in it.

The axes of a Strategy are replicate, shard, context and tensor. `fully_shard` shards model states
over shard and context together, so the device mesh has one axis "shard" for both.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.pytorch.device import (
    ONE_GROUP,
    backends,
    connect_when_needed,
    is_accelerator,
    use,
)
from shardwise.spec.mesh import AXES, Mesh
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

# Seconds in which a thread on a busy machine releases its tensors.
_SETTLE_S = 0.1
REPLICATE, SHARD, CONTEXT, TENSOR = AXES
# With expert parallelism, the devices of shard and context are also seen as groups that divide the
# experts among them, and as groups that hold and shard the same experts.
EXPERT, EXPERT_SHARD = "expert", "expert_shard"


def world() -> tuple[int, int]:
    """(rank of this process, number of processes); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def processes_per_node() -> int:
    """Number of processes on this machine."""
    _, size = world()
    return min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def join(device: torch.device) -> None:
    """Join the process group of a launcher, if its environment variables describe one."""
    use(device)
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    # Gloo's threads outlive their group, because DTensor keeps every mesh. A thread that still
    # holds tensors of the last collective when the interpreter ends would abort the process.
    # Run by `atexit` or, in a forked rank, when its function returns.
    Finalize(None, time.sleep, (_SETTLE_S,), exitpriority=0)
    if int(os.environ["WORLD_SIZE"]) > ONE_GROUP:
        connect_when_needed()
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
    """A device mesh with those of "replicate", "shard" and "tensor" that are in use, outer first.

    None for `single`. Context is part of "shard"; `context_group` creates its groups.
    """
    if strategy.kind == "single":
        return None
    ranks = ranks_of(strategy)
    if not dist.is_initialized():
        # One process without a launcher: a group of its own.
        store = dist.HashStore()
        dist.init_process_group(backends(device_type), store=store, rank=0, world_size=1)
    ranks = ranks.flatten(1, 2)
    names = mesh_axes(strategy)
    kept = [axis for axis, name in enumerate((REPLICATE, SHARD, TENSOR)) if name in names]
    shape = [ranks.shape[axis] for axis in kept]
    return DeviceMesh(device_type, ranks.reshape(shape), mesh_dim_names=names)


def mesh_axes(strategy: Strategy) -> tuple[str, ...]:
    """The axis names of a strategy's device mesh, outer first.

    DDP always has "replicate", `fully_shard` always "shard".
    """
    mesh = strategy.mesh
    used = {
        REPLICATE: strategy.kind == "ddp" or mesh.replicate > 1,
        SHARD: strategy.sharded,
        TENSOR: mesh.tensor > 1,
    }
    return tuple(name for name, is_used in used.items() if is_used)


def ranks_of(strategy: Strategy) -> torch.Tensor:
    """The rank at each coordinate of the mesh, a tensor (replicate, shard, context, tensor).

    Raises:
        SpecError: The strategy needs another number of processes than are running.
    """
    mesh, (_, size) = strategy.mesh, world()
    if mesh.devices != size:
        used = [f"{name} {degree}" for name, degree in mesh._asdict().items()
                if degree > 1 or name in (REPLICATE, SHARD)]  # fmt: skip
        raise SpecError(
            f"strategy: {' x '.join(used)} = {mesh.devices} processes, but {size} are running"
        )
    ranks = torch.zeros(mesh, dtype=torch.int)
    for number, axis in enumerate(AXES):
        steps = torch.arange(mesh[number], dtype=torch.int) * strategy.stride(axis)
        ranks += steps.reshape([-1 if other == axis else 1 for other in AXES])
    return ranks


def coordinates(strategy: Strategy) -> Mesh:
    """The coordinate of this process along each axis, from 0."""
    rank, _ = world()
    places = (rank // strategy.stride(axis) for axis in AXES)
    return Mesh(*(place % size for place, size in zip(places, strategy.mesh, strict=True)))


def data_rank(strategy: Strategy) -> int:
    """The number of the data shard that this process reads, from 0.

    It is the same for all processes of a context and tensor group.
    """
    here = coordinates(strategy)
    return here.replicate * strategy.mesh.shard + here.shard


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh without the tensor axis, for `fully_shard` or DDP."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)
    return mesh[names] if TENSOR in (mesh.mesh_dim_names or ()) else mesh


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The tensor axis of the mesh; None without tensor parallelism."""
    return mesh[TENSOR] if TENSOR in (mesh.mesh_dim_names or ()) else None


def context_group(strategy: Strategy) -> dist.ProcessGroup:
    """Create the context groups and return that of this process; all processes must call it."""
    return _new_group(ranks_of(strategy), AXES.index(CONTEXT), CONTEXT)


def _new_group(ranks: torch.Tensor, axis: int, name: str) -> dist.ProcessGroup:
    """Create the groups of ranks along one axis and return that of this process."""
    groups = ranks.movedim(axis, -1).flatten(0, -2).tolist()
    description = f"mesh_{name}"
    group, _ = dist.new_subgroups_by_enumeration(groups, group_desc=description)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return group


def expert_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh of experts: "replicate" if there are replicas, "expert_shard" and "expert".

    Expert groups are neighbours, so that they fill a node first. All groups are new, also where
    another axis has the same ranks: exchanges of tokens do not queue behind gathers of parameters.
    """
    mesh = strategy.mesh
    shape = [mesh.replicate, mesh.states // strategy.expert, strategy.expert]
    names: tuple[str, ...] = (REPLICATE, EXPERT_SHARD, EXPERT)
    first = 0 if mesh.replicate > 1 else 1
    ranks, names = ranks_of(strategy).reshape(shape[first:]), names[first:]
    groups = [_new_group(ranks, axis, name) for axis, name in enumerate(names)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def sharding_mesh_of_experts(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh of experts over which `fully_shard` shards them."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != EXPERT)
    return mesh[names]


def axes_of_groups(
    meshes: Iterable[DeviceMesh | None], context: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """The axis of each process group, by the name of the group.

    A mesh with one axis uses the group of all processes, which the trainer uses too.
    """
    axes: dict[str, str] = {}
    for mesh in filter(None, meshes):
        for name in mesh.mesh_dim_names or ():
            axes.setdefault(mesh.get_group(name).group_name, name)
    return {**axes, context.group_name: CONTEXT} if context is not None else axes
