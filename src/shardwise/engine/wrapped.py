"""What a model is that someone else has wrapped: its strategy and its collectives, as torch knows.

Reads what `fully_shard` and DDP keep about a module; nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.mesh import resolve_for_world, world
from shardwise.engine.sync import is_parallel, strategy_of
from shardwise.spec.dtype import DType
from shardwise.spec.strategy import Strategy
from shardwise.step import CollectiveProfile
from shardwise.units.module import TORCH_DTYPES

_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class _Group(NamedTuple):
    """What torch keeps of a group, and whether it is sharded again after its forward."""

    state: Any
    reshards: bool | int


def read_strategy(model: nn.Module, **settings: object) -> Strategy:
    """The resolved strategy of a model that is ready to train.

    `settings` are those that only its loop knows, such as `micro_batch` and `accumulate`.
    """
    if is_parallel(model):
        return resolve_for_world(strategy_of(model).but(**settings))
    groups = list(_groups(model))
    if groups:
        return resolve_for_world(_sharded(groups, settings))
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    found: dict[str, object] = {"kind": "single", "master_dtype": _NAMES[dtype]}
    if isinstance(model, DistributedDataParallel) and world()[1] > 1:
        found["kind"] = "ddp"
        if not model.bucket_bytes_cap_default:
            found["ddp_bucket_mib"] = model.bucket_bytes_cap / 2**20
    found = {"param_dtype": _NAMES[dtype], "reduce_dtype": _NAMES[dtype], **found}
    return resolve_for_world(Strategy.read({**found, **settings}))


def _sharded(groups: list[_Group], settings: dict[str, object]) -> Strategy:
    # The unit that comes most often is that of the blocks.
    kinds = [group.reshards for group in groups]
    reshard = max(kinds, key=kinds.count)
    group = groups[kinds.index(reshard)].state
    master = _kept_in(group)
    param = group.mp_policy.param_dtype or master
    mesh = group.mesh_info
    found: dict[str, object] = {
        "kind": "zero3" if reshard else "zero2",
        "shard": mesh.shard_mesh_size,
        "replicate": getattr(mesh, "replicate_mesh_size", 1),
        "master_dtype": _NAMES[master],
        "param_dtype": _NAMES[param],
        "reduce_dtype": _NAMES[group.mp_policy.reduce_dtype or param],
        "reshard_after_forward": reshard,
        # Loops other than ours leave it as it is, and then a backward reshards.
        "reshard_after_backward": group.reshard_after_backward,
        "offload": group.offload_policy.__class__.__name__ == "CPUOffloadPolicy",
    }
    return Strategy.read({**found, **settings})


def sharded_traffic(model: nn.Module, strategy: Strategy) -> tuple[CollectiveProfile, ...] | None:
    """The collectives of one step of the groups that are really there; None without any.

    Of the arguments, `strategy` says how many micro-batches a step has and when gradients are
    reduced; groups, sizes and dtypes are those of the model.
    """
    found: dict[tuple[str, str, int], tuple[int, int]] = {}

    def add(op: str, group: str, size: int, calls: int, each: int) -> None:
        if size > 1:
            before = found.get((op, group, size), (0, 0))
            found[op, group, size] = (before[0] + calls, before[1] + calls * each)

    groups = list(_groups(model))
    micro_batches = strategy.accumulate
    for group, reshard in groups:
        shard = group.mesh_info.shard_mesh_size
        replicate = getattr(group.mesh_info, "replicate_mesh_size", 1)
        elements = sum(p.padded_sharded_param_size.numel() for p in group.fsdp_params) * shard
        trained = elements if any(p.sharded_param.requires_grad for p in group.fsdp_params) else 0
        param = group.mp_policy.param_dtype or _kept_in(group)
        reduce = group.mp_policy.reduce_dtype or param
        gathers = micro_batches if group.reshard_after_backward else 1
        add("all_gather", "shard", shard, gathers, elements * param.itemsize)
        if reshard:
            size = shard if reshard is True else reshard
            # What lies in smaller groups is less padded than what lies in the whole one; it is
            # gathered from shards of the size of those groups.
            add("all_gather", "shard", size, micro_batches, elements * param.itemsize)
        if not trained:
            continue
        reduced = 1 if strategy.grad_sync == "last" else micro_batches
        add("reduce_scatter", "shard", shard, reduced, trained * reduce.itemsize)
        summed = micro_batches if strategy.grad_sync == "every" else 1
        add("all_reduce", "replicate", replicate, summed, trained // shard * reduce.itemsize)
    if not groups:
        return None
    return tuple(
        CollectiveProfile(op=op, group=group, group_size=size, calls=calls, bytes=total)
        for (op, group, size), (calls, total) in found.items()
    )


def beside_gradients(model: nn.Module, strategy: Strategy) -> tuple[CollectiveProfile, ...]:
    """What DDP sends that is no gradient: buffers from the first rank, and who used what."""
    if not isinstance(model, DistributedDataParallel) or world()[1] == 1:
        return ()
    size, found = world()[1], []
    # Those of a forward that follows a backward without reduction are left out.
    times = strategy.accumulate if strategy.grad_sync == "every" else 1
    if model.forward_sync_buffers and model.modules_buffers:
        dtypes = {buffer.dtype for buffer in model.modules_buffers}
        total = sum(buffer.nbytes for buffer in model.modules_buffers)
        found.append(
            CollectiveProfile("broadcast", "replicate", size, times * len(dtypes), times * total)
        )
    if model.find_unused_parameters:
        used = 4 * sum(1 for parameter in model.parameters() if parameter.requires_grad)
        found.append(CollectiveProfile("all_reduce", "replicate", size, times, times * used))
    return tuple(found)


def keeps_two_gradients(model: nn.Module) -> bool:
    """Whether DDP holds gradients in its buckets and once more where the optimizer reads them."""
    return isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view


def _groups(model: nn.Module) -> Iterator[_Group]:
    """Each a module, or several, that `fully_shard` gathers together."""
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        # One that was not told keeps its parameters if it is the root, which the first forward
        # finds out.
        kept = module is model and bool(state._auto_reshard_after_forward)
        for group in state._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield _Group(group, False if kept else _reshards(group))


def _kept_in(group: Any) -> torch.dtype:
    dtype: torch.dtype = group.fsdp_params[0].sharded_param.dtype
    return dtype


def _reshards(group: Any) -> bool | int:
    """Whether a group is sharded again after its forward, or over how many devices."""
    if not group._reshard_after_forward:
        return False
    if group._use_post_forward_mesh:
        return int(group.post_forward_mesh_info.shard_mesh_size)
    return True
