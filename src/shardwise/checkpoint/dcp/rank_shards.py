"""The shards that this rank holds, as torch's planner cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Placement

from shardwise.checkpoint.format.sharding import Box

_Key = tuple[type, int, tuple[Placement, ...], torch.Size, torch.dtype]


def shards_of(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, WriteItem | None]]:
    """Yield the name and the shard of each tensor; the shard is None if this rank has none.

    Models have thousands of tensors, and few shapes: torch's planner is called once for all tensors
    that are divided alike. So the name in a shard may be that of another tensor.
    """
    known: dict[_Key, WriteItem | None] = {}
    for name, tensor in state.items():
        key = _key(tensor)
        if key not in known:
            known[key] = _shard_of(name, tensor)
        yield name, known[key]


def _key(tensor: torch.Tensor) -> _Key:
    """Key that is equal for tensors that ranks divide alike."""
    if isinstance(tensor, DTensor):
        mesh, placements = id(tensor.device_mesh), tensor.placements
        return type(tensor), mesh, placements, tensor.shape, tensor.dtype
    return type(tensor), 0, (), tensor.shape, tensor.dtype


def _shard_of(name: str, tensor: torch.Tensor) -> WriteItem | None:
    """The shard of a tensor on this rank, from torch's planner; None if it has none."""
    items = create_default_local_save_plan({name: tensor}, is_coordinator=False).items
    if len(items) > 1:
        raise TypeError(f"{name} has several shards on one rank, which is not supported")
    return items[0] if items else None


def box_of(item: WriteItem | None) -> Box | None:
    """Offsets and sizes of a shard in its tensor; None if there is no shard."""
    if item is None or item.tensor_data is None:
        return None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))
