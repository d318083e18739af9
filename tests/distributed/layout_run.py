"""Save tensors that ranks divide in unusual ways, and load them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.checkpoint.dcp.load import load_last
from shardwise.checkpoint.dcp.save import SaveError, Saver
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.storage import find_storage
from shardwise.engine.rank_tree import RankTree

# Two MiB in fp32, so that two replicas write two of four each.
LARGE = (1024, 512)


def numbers(shape: tuple[int, ...], first: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=torch.float32).reshape(shape)


def expected() -> dict[str, torch.Tensor]:
    """The tensors as a whole."""
    return {
        "permuted": numbers((10, 3)),
        "on two": numbers((5,)),
        **{f"replicated {n}": numbers(LARGE, n) for n in range(4)},
        "both dimensions": numbers((7, 5)),
        "plain": numbers((3,)),
    }


def divided() -> dict[str, torch.Tensor]:
    """The same on four ranks, each with its shards."""
    full = expected()
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    cut: dict[str, Any] = {
        # No stride describes the order of these ranks.
        "permuted": (DeviceMesh("cpu", [0, 3, 1, 2]), [Shard(0)]),
        "on two": (DeviceMesh("cpu", [0, 1]), [Shard(0)]),
        **{f"replicated {n}": (mesh, [Replicate(), Shard(0)]) for n in range(4)},
        "both dimensions": (mesh, [Shard(1), Shard(0)]),
    }
    return {name: _sharded(full[name], *where) for name, where in cut.items()} | {
        "plain": full["plain"]
    }


def _sharded(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    """The shard of this rank by its place in the mesh; none if it has no place there."""
    local, place = full, mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and place is not None:
            local = local.chunk(mesh.size(axis), placement.dim)[place[axis]]
    return DTensor.from_local(
        local.contiguous() if place is not None else torch.empty(0),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def save(case: dict[str, Any]) -> str:
    """Save a step; what is said if it fails."""
    state = divided()
    if case.get("more_on") == dist.get_rank():
        state["more"] = torch.zeros(1)
    saver = Saver(find_storage(case["place"]), 0, case.get("background", False))
    own = {f"rank.{dist.get_rank()}.mark": torch.tensor([dist.get_rank()])}
    about = Manifest(step=1, world=4, sequences=0, run={}, versions={})
    return said_by(saver, state, own, about)


def said_by(
    saver: Saver, state: dict[str, torch.Tensor], own: dict[str, torch.Tensor], about: Manifest
) -> str:
    """Save; what is said if it fails."""
    saver.save(state, {}, own, about)
    try:
        saver.wait()
    except SaveError as error:
        return str(error)
    return ""


def load(case: dict[str, Any]) -> list[str]:
    """Load into shards, or with `whole` into full tensors; the names of those that differ."""
    room = expected() if case["whole"] else divided()
    for tensor in room.values():
        _local(tensor).zero_()

    def into(_: Manifest, saved: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
        return room

    loaded = load_last(find_storage(case["place"]), into)
    assert loaded is not None
    assert loaded.skipped == []
    if case["whole"]:
        return [name for name, full in expected().items() if not torch.equal(room[name], full)]
    pairs = {name: (room[name], tensor) for name, tensor in divided().items()}
    return [
        name for name, (one, other) in pairs.items() if not torch.equal(_local(one), _local(other))
    ]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def reduce_in_levels(case: dict[str, Any]) -> dict[str, Any]:
    """All collectives of a tree with three levels, or with `one_group` with one."""
    tree = RankTree(separate=True, one_group=case["one_group"])
    rank = tree.rank
    sums, largest = torch.tensor([rank, 10**15 * rank]), torch.tensor([rank, -rank])
    tree.all_reduce(sums)
    tree.all_reduce(largest, dist.ReduceOp.MAX)
    started = []
    for step in range(20):
        values = torch.tensor([rank * step])
        wait = tree.start_all_reduce(values)
        wait()
        started.append(int(values))
    fails = rank in case["fails"]
    return {
        "sums": sums.tolist(),
        "largest": largest.tolist(),
        "started": started,
        "none": tree.first_failure(""),
        "failure": tree.first_failure(f"näher at rank {rank}: " + "é" * 600 if fails else ""),
    }
