"""`parallelize`: apply a Strategy to a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.adapter import FrozenWeights, check_adapter, is_quantised
from shardwise.engine.compress import compress_gradients
from shardwise.engine.context import divide_sequences
from shardwise.engine.expert import ExpertParallel
from shardwise.engine.fused_loss import apply_fused_loss
from shardwise.engine.local_parts import keep_local_parts
from shardwise.engine.loss import apply_chunked_loss
from shardwise.engine.materialize import Fill, Materializer, is_meta
from shardwise.engine.mesh import (
    axes_of_groups,
    context_group,
    fsdp_mesh,
    make_mesh,
    resolve_for_world,
    tensor_mesh,
)
from shardwise.engine.offload import offload_activations
from shardwise.engine.recompute import apply_recompute
from shardwise.engine.sync import store_strategy
from shardwise.engine.tensor import TensorParallel
from shardwise.pytorch.blocks import RootParts, root_parts
from shardwise.pytorch.device import local_device
from shardwise.pytorch.parts import Parts
from shardwise.pytorch.private import fix_buckets, local_tensor
from shardwise.spec.dispatch import ALL_TO_ALL
from shardwise.spec.fused_loss import check_fused_loss
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES
from shardwise.units.unit import shard_dimension


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh | None = None,
    *,
    device: torch.device | None = None,
    fill: Fill | None = None,
    seed: int = 0,
) -> nn.Module:
    """Apply `strategy` to `model`: loss, recompute, compile and every kind of parallelism.

    Sharded kinds change the model in place and return it; `ddp` returns it wrapped. The optimizer
    must be created from the parameters of the returned model.

    A model on the meta device is allocated unit by unit on `device`, and initialised by `fill` or
    by its own initialisers, from `seed`. Frozen weights of an adapted model are stored in the
    format of its adapter.
    """
    strategy = resolve_for_world(strategy)
    device = device or _device(model)
    _check_can_run(strategy, device)
    parts = Parts(model)
    check_adapter(parts.adapter, strategy)
    blocks = list(parts.blocks.values())
    master = TORCH_DTYPES[strategy.kept_dtype]
    frozen = FrozenWeights(parts, strategy.mesh.states if strategy.sharded else 1)
    materializer = Materializer(model, device, master, fill, seed, frozen)
    _check_parameters(parts, None if is_meta(model) else master)
    root = root_parts(model, parts.blocks) if strategy.split_root else None
    mesh = mesh or make_mesh(strategy, device.type)
    divided = mesh and tensor_mesh(mesh)
    tensor = TensorParallel(model, strategy, divided) if divided else None
    expert = ExpertParallel(model, strategy, device.type) if strategy.expert > 1 else None
    context = _divide_sequences(model, strategy, device.type) if strategy.context > 1 else None
    _change_forward(model, blocks, strategy)

    def prepare(members: Sequence[nn.Module]) -> None:
        """Allocate and initialise a unit, then apply tensor parallelism to its layers."""
        materializer.unit(members)
        if tensor is not None:
            tensor.unit(members)

    if strategy.sharded:
        assert mesh is not None
        _shard(parts, root, strategy, fsdp_mesh(mesh), prepare, expert)
        _check_sharded(model)
    else:
        # Block by block: frozen weights are small once they are stored.
        for members in parts.one_by_one():
            prepare(members)
    frozen.finish(model)
    if not strategy.sharded:
        _apply_autocast(model, strategy, device)
    if strategy.kind == "ddp":
        assert mesh is not None
        keep_local_parts(model)
        model = _replicate(parts, strategy, fsdp_mesh(mesh))
    meshes = [mesh, expert.mesh if expert is not None else None]
    return store_strategy(model, strategy, axes_of_groups(meshes, context))


def _check_can_run(strategy: Strategy, device: torch.device) -> None:
    """Raise SpecError for what can only be planned: low-bit products, a fused loss on CPUs."""
    check_fused_loss(strategy, device.type)
    if strategy.attention not in (None, "sdpa"):
        raise SpecError(
            f"strategy.attention: {strategy.attention} is planned and exported, not trained; leave "
            "it out, or export the run"
        )
    if strategy.expert > 1 and strategy.dispatch not in (None, ALL_TO_ALL):
        raise SpecError(
            f"strategy.dispatch: {strategy.dispatch} is planned and exported, not trained; leave "
            "it out, or export the run"
        )
    if strategy.linear_dtype is not None:
        raise SpecError(
            f"strategy.linear_dtype: products in {strategy.linear_dtype} are planned, not trained; "
            "leave it out, or export the run"
        )


def _divide_sequences(model: nn.Module, strategy: Strategy, device_type: str) -> dist.ProcessGroup:
    """Make the model attend over sequences that a context group divides; return the group."""
    group = context_group(strategy)
    divide_sequences(model, strategy, group, device_type)
    return group


def _change_forward(model: nn.Module, blocks: Sequence[nn.Module], strategy: Strategy) -> None:
    """Apply loss, recompute, offload of activations and compile, which need no FSDP units."""
    if strategy.loss == "chunked":
        apply_chunked_loss(model, strategy.loss_chunks)
    elif strategy.loss == "fused":
        apply_fused_loss(model, strategy.loss_kernel)
    apply_recompute(blocks, strategy)
    offload_activations(blocks, strategy)
    if strategy.compile:
        for block in blocks:
            block.compile()


def _replicate(parts: Parts, strategy: Strategy, mesh: DeviceMesh) -> nn.Module:
    """Wrap the model with DDP."""
    adapter = parts.adapter
    replicated = DistributedDataParallel(
        parts.module,
        process_group=mesh.get_group(),
        bucket_cap_mb=strategy.ddp_bucket_mib,
        # Gradients are views of the buckets: no second copy.
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        # Quantised weights cannot be broadcast, nor DTensors among others; all are the same on
        # every rank, as they come from the same seed or the same files.
        init_sync=strategy.tensor == 1 and (adapter is None or not adapter.quantised),
    )
    # A resumed process must reduce its first step as the process before it would have.
    fix_buckets(replicated)
    compress_gradients(replicated, strategy, mesh)
    return replicated


def _shard(
    parts: Parts,
    root: RootParts | None,
    strategy: Strategy,
    mesh: DeviceMesh,
    prepare: Callable[[Sequence[nn.Module]], None],
    expert: ExpertParallel | None = None,
) -> None:
    """Apply fully_shard to units of blocks, then to the root; `prepare` is called before each.

    With `root`, embedding and head become units of their own.
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _precision(strategy, parts),
        "offload_policy": _offload(strategy, mesh),
        "shard_placement_fn": _shard_placement(strategy),
    }

    inside: dict[FSDPModule, list[FSDPModule]] = {}

    def unit(members: list[nn.Module], reshard: bool | int | None) -> FSDPModule:
        """Make `members` one FSDP unit; return its first module."""
        prepare(members)
        experts = expert.unit(members, reshard, settings) if expert is not None else []
        together = members if len(members) > 1 else members[0]
        fully_shard(together, reshard_after_forward=reshard, **settings)
        made = cast(FSDPModule, members[0])
        inside[made] = experts
        return made

    size, blocks = strategy.blocks_per_unit, list(parts.blocks.values())
    starts = range(0, len(blocks), size)
    units = [unit(blocks[i : i + size], strategy.reshard_after_forward) for i in starts]
    last = []
    if root is not None:
        # A lookup's backward does not read the table.
        embedding = unit([root.embedding], strategy.reshard_after_forward is not False)
        embedding.set_unshard_in_backward(False)
        last.append(unit(root.head, False))
    # The root's parameters are used first and last: resharding in between would only gather
    # them twice.
    last.append(unit([parts.module], False))
    _set_prefetch(units, last, strategy, inside)


def _shard_placement(strategy: Strategy) -> Callable[[nn.Parameter], Shard] | None:
    """A function that chooses which dimension of a parameter fully_shard shards, to pad little.

    None means dimension 0. FSDP2 of torch 2.13 fails to gather other dimensions again after an
    integer reshard.
    """
    if not isinstance(strategy.reshard_after_forward, bool):
        return None
    states = strategy.mesh.states

    def placement(parameter: nn.Parameter) -> Shard:
        # NF4 tensors can be sharded along rows only.
        rows = is_quantised(parameter)
        return Shard(0 if rows else shard_dimension(local_tensor(parameter).shape, states))

    return placement


def _apply_autocast(model: nn.Module, strategy: Strategy, device: torch.device) -> None:
    """Run the forward under autocast, for DDP and single: no all-gather casts parameters."""
    if strategy.autocast:
        autocast = torch.autocast(device.type, dtype=TORCH_DTYPES[strategy.param_dtype])
        model.forward = autocast(model.forward)


def _set_prefetch(
    units: Sequence[FSDPModule],
    last: Sequence[FSDPModule],
    strategy: Strategy,
    inside: Mapping[FSDPModule, Sequence[FSDPModule]],
) -> None:
    """Set how many units ahead are gathered, if it differs from FSDP2's default.

    `last` are the units of embedding, head and root, which are no blocks; `inside` are the divided
    experts of each unit. The host waits inside experts, and issues no gather until it knows how
    many tokens come: in the forward, experts are gathered ahead too, before it waits.
    """
    if strategy.prefetch != 1:
        for unit in (*units, *last):
            index = units.index(unit) if unit in units else len(units)
            ahead = list(units[max(0, index - strategy.prefetch) : index][::-1])
            # An empty list means FSDP2's default; a unit that prefetches itself prefetches none.
            unit.set_modules_to_backward_prefetch(ahead or [unit])
    if strategy.forward_prefetch:
        for index, unit in enumerate(units):
            reached = units[index : index + 1 + strategy.forward_prefetch]
            ahead = [one for other in reached for one in (other, *inside[other])]
            unit.set_modules_to_forward_prefetch(ahead[1:])


def _precision(strategy: Strategy, parts: Parts) -> MixedPrecisionPolicy:
    """The mixed-precision policy for fully_shard."""
    param, reduce, master = (
        TORCH_DTYPES[dtype]
        for dtype in (strategy.param_dtype, strategy.reduce_dtype, strategy.kept_dtype)
    )
    parameters = parts.module.parameters()
    stored = {p.dtype for p in parameters if p.is_floating_point() and not p.is_meta}
    if parts.adapter is not None:
        stored.add(TORCH_DTYPES[parts.adapter.float_dtype])
    return MixedPrecisionPolicy(
        # Frozen weights may be stored in another dtype than trained ones: both are gathered in one.
        param_dtype=None if {param} == stored | {master} else param,
        reduce_dtype=None if reduce == param == master else reduce,
    )


def _offload(strategy: Strategy, mesh: DeviceMesh) -> OffloadPolicy:
    """The offload policy for fully_shard."""
    if not strategy.offloads("parameters"):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


def _device(model: nn.Module) -> torch.device:
    """The device of the model; the local device for a model on the meta device."""
    return local_device() if is_meta(model) else next(model.parameters()).device


def _check_parameters(parts: Parts, master: torch.dtype | None) -> None:
    """Raise SpecError for ties and dtypes that fully_shard reports late or not at all.

    With `master`, trained parameters must have this dtype.
    """
    problems = []
    for aliases in parts.aliases:
        inside = [n for n in aliases if any(n.startswith(f"{block}.") for block in parts.blocks)]
        if len(aliases) > 1 and inside and parts.owner[aliases[0]] == "":
            problems.append(
                f"model: {aliases[0]} and {aliases[1]} are tied but belong to different units; "
                "untie them or move one out of its block"
            )
    dtypes: dict[str, dict[torch.dtype, str]] = {}
    # Frozen parameters are gathered in a dtype of their own and never reduced.
    trained = {name: p for name, p in parts.module.named_parameters() if p.requires_grad}
    for name, unit in parts.owner.items():
        if name in trained:
            dtypes.setdefault(unit, {}).setdefault(trained[name].dtype, name)
    for unit, first_names in dtypes.items():
        if len(first_names) > 1:
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in first_names.items())
            problems.append(
                f"model: unit '{unit or 'root'}' mixes dtypes ({listed}); FSDP reduces a unit in "
                "one dtype: convert its trained parameters to the same"
            )
    if not problems and master is not None:
        other = [name for name, p in trained.items() if p.dtype != master]
        if other:
            problems.append(
                f"model: {other[0]} is {trained[other[0]].dtype}, but the strategy "
                f"keeps parameters in {master}; convert the model or set master_dtype"
            )
    if problems:
        raise SpecError(problems)


def _check_sharded(model: nn.Module) -> None:
    """Raise SpecError if a parameter was not sharded."""
    unsharded = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unsharded:
        raise SpecError(
            f"model: {len(unsharded)} parameters were not sharded, such as {unsharded[0]}"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise SpecError for an optimizer created before sharding: it would update no parameter."""
    current = {id(parameter) for parameter in model.parameters()}
    missing = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in current
    ]
    if missing:
        raise SpecError(
            f"optimizer: {len(missing)} of its parameters are not in the model; create the "
            "optimizer after parallelize, from the parameters of the returned model"
        )
