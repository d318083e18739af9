"""Read the strategy and the collectives of a model that other code wrapped with FSDP2 or DDP.

Uses the state that `fully_shard` and DDP keep on modules; nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.mesh import resolve_for_world, world
from shardwise.engine.sync import is_parallel, parallel_axes, strategy_of
from shardwise.pytorch.private import (
    chooses_reshard,
    fsdp_groups,
    reshards_after_forward,
    unsharded_parameter,
)
from shardwise.spec.dtype import DType
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import CollectiveProfile
from shardwise.units.module import TORCH_DTYPES
from shardwise.units.unit import ModelUnits, Parameter, Unit

_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class _Group(NamedTuple):
    """FSDP2's state of a parameter group, and its `reshard_after_forward`."""

    state: Any
    reshards: bool | int


def read_strategy(model: nn.Module, **settings: object) -> Strategy:
    """The resolved strategy of a model that is ready to train.

    `settings` are fields that only the training loop knows, such as `micro_batch` and `accumulate`.
    """
    if is_parallel(model):
        return resolve_for_world(strategy_of(model).but(**settings))
    groups = list(_groups(model))
    if groups:
        return resolve_for_world(_sharded(groups, settings))
    dtype = _trained_dtype(p for p in model.parameters() if p.is_floating_point())
    fields: dict[str, object] = {"kind": "single", "master_dtype": _NAMES[dtype]}
    if isinstance(model, DistributedDataParallel) and world()[1] > 1:
        fields["kind"] = "ddp"
        if not model.bucket_bytes_cap_default:
            fields["ddp_bucket_mib"] = model.bucket_bytes_cap / 2**20
    fields = {"param_dtype": _NAMES[dtype], "reduce_dtype": _NAMES[dtype], **fields}
    return resolve_for_world(Strategy.read({**fields, **settings}))


def _sharded(groups: list[_Group], settings: dict[str, object]) -> Strategy:
    """The strategy of FSDP groups: that of most groups with trained parameters."""
    # Groups of frozen weights alone, such as an embedding's, do not show the master dtype.
    groups = [group for group in groups if _is_trained(group.state)] or groups
    # Most groups are blocks; the root may differ.
    values = [group.reshards for group in groups]
    reshard = max(values, key=values.count)
    group = groups[values.index(reshard)].state
    master = _master_dtype(group)
    param = group.mp_policy.param_dtype or master
    mesh = group.mesh_info
    fields: dict[str, object] = {
        "kind": "zero3" if reshard else "zero2",
        "shard": mesh.shard_mesh_size,
        "replicate": getattr(mesh, "replicate_mesh_size", 1),
        "master_dtype": _NAMES[master],
        "param_dtype": _NAMES[param],
        "reduce_dtype": _NAMES[group.mp_policy.reduce_dtype or param],
        "reshard_after_forward": reshard,
        # Other loops keep FSDP2's default, which reshards after every backward.
        "reshard_after_backward": group.reshard_after_backward,
        "offload": group.offload_policy.__class__.__name__ == "CPUOffloadPolicy",
    }
    return Strategy.read({**fields, **settings})


def axes_of(model: nn.Module) -> dict[str, str]:
    """The axis of each process group of a model, by the name of the group."""
    if is_parallel(model):
        return parallel_axes(model)
    if isinstance(model, DistributedDataParallel):
        return {model.process_group.group_name: "replicate"}
    axes: dict[str, str] = {}
    for group in _groups(model):
        mesh = group.state.mesh_info
        axes.setdefault(mesh.shard_process_group.group_name, "shard")
        if hasattr(mesh, "replicate_process_group"):
            axes.setdefault(mesh.replicate_process_group.group_name, "replicate")
    return axes


def sharded_units(model: nn.Module, strategy: Strategy) -> list[tuple[ModelUnits, Strategy]]:
    """The FSDP groups of a model as units, grouped by strategy: pairs of units and their strategy.

    `strategy` gives the micro-batches per step and when gradients are reduced. Groups, sizes and
    dtypes are read from the model. The list is empty if the model has no FSDP groups.
    """
    alike: dict[Strategy, list[Unit]] = {}
    settings: dict[str, object] = {
        "accumulate": strategy.accumulate,
        "grad_sync": strategy.grad_sync,
    }
    for group in _groups(model):
        own = _sharded([group], settings)
        alike.setdefault(own, []).append(Unit(name="group", parameters=_parameters(group.state)))
    nothing = Unit(name="root", parameters=())
    return [
        (ModelUnits(name="wrapped", seq_len=1, root=nothing, blocks=tuple(found)), own)
        for own, found in alike.items()
    ]


def _parameters(group: Any) -> tuple[Parameter, ...]:
    """The parameters of an FSDP group, with full shapes and how they are stored."""
    casts, master = group.mp_policy.param_dtype is not None, _master_dtype(group)

    def described(parameter: Any) -> Parameter:
        """A parameter of the group with its full shape."""
        tensor = parameter.sharded_param
        made = Parameter(
            *unsharded_parameter(parameter),
            trainable=tensor.requires_grad,
            dim=parameter.fsdp_placement.dim,
        )
        if casts or tensor.requires_grad or tensor.dtype == master:
            return made
        return made._replace(stored=float(tensor.element_size()), uncast=True)

    return tuple(described(parameter) for parameter in group.fsdp_params)


def casts_parameters(model: nn.Module) -> bool:
    """Whether `fully_shard` casts parameters to a `param_dtype` when it gathers them."""
    return any(group.state.mp_policy.param_dtype is not None for group in _groups(model))


def shards_along_rows(model: nn.Module) -> bool:
    """Whether every parameter that `fully_shard` manages is sharded along its first dimension."""
    return not any(p.fsdp_placement.dim for g in _groups(model) for p in g.state.fsdp_params)


def non_gradient_traffic(model: nn.Module, strategy: Strategy) -> tuple[CollectiveProfile, ...]:
    """DDP's collectives of a step other than the reduction of gradients.

    These are broadcasts of buffers, and all-reduces of the map of used parameters.
    """
    if not isinstance(model, DistributedDataParallel) or world()[1] == 1:
        return ()
    size, traffic = world()[1], []
    # DDP skips them in micro-batches after one without gradient reduction.
    times = strategy.accumulate if strategy.grad_sync == "every" else 1
    if model.forward_sync_buffers and model.modules_buffers:
        dtypes = {buffer.dtype for buffer in model.modules_buffers}
        total = sum(buffer.nbytes for buffer in model.modules_buffers)
        traffic.append(
            CollectiveProfile("broadcast", "replicate", size, times * len(dtypes), times * total)
        )
    if model.find_unused_parameters:
        used = 4 * sum(1 for parameter in model.parameters() if parameter.requires_grad)
        traffic.append(CollectiveProfile("all_reduce", "replicate", size, times, times * used))
    return tuple(traffic)


def keeps_two_gradients(model: nn.Module) -> bool:
    """Whether DDP keeps gradients twice: in its buckets and in `.grad`."""
    return isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view


def _groups(model: nn.Module) -> Iterator[_Group]:
    """Yield each group of parameters that `fully_shard` gathers together, once."""
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # Without reshard_after_forward FSDP2 decides in the first forward: the root keeps its
        # parameters, other modules reshard.
        kept = module is model and chooses_reshard(module)
        for group in fsdp_groups(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield _Group(group, False if kept else reshards_after_forward(group))


def _is_trained(group: Any) -> bool:
    """Whether any parameter of an FSDP group is trained."""
    return any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)


def _master_dtype(group: Any) -> torch.dtype:
    """The dtype of the sharded parameters of an FSDP group."""
    return _trained_dtype(parameter.sharded_param for parameter in group.fsdp_params)


def _trained_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype of the first trained parameter, or of the first parameter if all are frozen.

    Frozen weights of adapted models often have another dtype.
    """
    known = list(parameters)
    return next((p.dtype for p in known if p.requires_grad), known[0].dtype)
