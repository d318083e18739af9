"""The model on its devices: recomputed, compiled, sharded or replicated."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.stacks.program.compress import compress_gradients
from shardwise.stacks.program.divide import divide_block, divide_ends
from shardwise.stacks.program.foreign import Initializer, build, find_blocks
from shardwise.stacks.program.loss import compute_loss_in_chunks
from shardwise.stacks.program.model import Transformer, initialize
from shardwise.stacks.program.settings import (
    BACKWARD_PREFETCH,
    BLOCKS,
    BLOCKS_PER_UNIT,
    BUCKET_MIB,
    CHUNKED_LOSS,
    COMPILE,
    COMPRESS,
    CONTEXT,
    DEVICE,
    DIVIDED,
    FORWARD_PREFETCH,
    KIND,
    MASTER_DTYPE,
    META_INIT,
    MODEL,
    OFFLOAD,
    ON_META,
    PARAM_DTYPE,
    PLACES,
    RECOMPUTE,
    RECOMPUTE_SHARE,
    REDUCE_DTYPE,
    REPLICATE,
    RESHARD_AFTER_FORWARD,
    SEED,
    SHARD,
    SYNCS_BUFFERS,
    TENSOR,
    TENSOR_ACROSS_NODES,
    WRAPS_DDP,
)


def keep_half_of_matmuls() -> Any:
    """Save the outputs of attention and of every other matmul; recompute the rest."""
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = "_scaled_dot_product" in operation.__name__
        if operation in matmuls:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute_and_compile(blocks: list[Any]) -> None:
    """Change blocks before they are sharded: one gather serves recompute and backward."""
    if RECOMPUTE == "selective":
        recomputed = partial(checkpoint, use_reentrant=False, context_fn=keep_half_of_matmuls)
        for block in blocks:
            block.forward = partial(recomputed, block.forward)
    elif RECOMPUTE == "full":
        if RECOMPUTE_SHARE < 1:
            chosen = blocks[: math.ceil(RECOMPUTE_SHARE * len(blocks) - 1e-9)]
        for block in chosen if RECOMPUTE_SHARE < 1 else blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if COMPILE:
        for block in blocks:
            block.compile()


def make_mesh() -> DeviceMesh:
    """The mesh of processes that share parameters, by what they divide."""
    if TENSOR_ACROSS_NODES:
        # The devices of a tensor group lie as far apart as they can.
        ranks = torch.arange(dist.get_world_size()).view(TENSOR, REPLICATE, SHARD * CONTEXT)
        names = ("replicate", "shard", "tensor")
        return DeviceMesh(DEVICE, ranks.movedim(0, -1), mesh_dim_names=names)
    if DIVIDED:
        shape, axes = (REPLICATE, SHARD * CONTEXT, TENSOR), ("replicate", "shard", "tensor")
        return init_device_mesh(DEVICE, shape, mesh_dim_names=axes)
    # Sharded inside a group, replicated across groups.
    return init_device_mesh(DEVICE, (REPLICATE, SHARD), mesh_dim_names=("replicate", "shard"))


def place(shards: int, parameter: nn.Parameter) -> Shard:
    """Stacked experts are divided along the first dimension that needs no padding."""
    even = [dim for dim, size in enumerate(parameter.shape) if size % shards == 0]
    return Shard(even[0] if even and parameter.ndim > 2 else 0)


def shard(model: Any) -> None:
    """Shard block by block; a block that is resharded is gathered again when it computes."""
    if DIVIDED or REPLICATE > 1:
        mesh = make_mesh()
    else:
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("shard",))
    blocks = find_blocks(model) if BLOCKS is None else list(model.get_submodule(BLOCKS))
    if RECOMPUTE != "none" or COMPILE:
        recompute_and_compile(blocks)
    if DIVIDED:
        states = mesh["shard"] if REPLICATE == 1 else mesh["replicate", "shard"]
    settings: dict[str, Any] = {
        "mesh": states if DIVIDED else mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=PARAM_DTYPE, reduce_dtype=REDUCE_DTYPE),
        **({"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE != "cpu")} if OFFLOAD else {}),
        **({"shard_placement_fn": partial(place, mesh["shard"].size())} if PLACES else {}),
    }
    if MODEL != "written" and META_INIT:
        fill = Initializer(model)
    for number, block in enumerate(blocks):
        if MODEL == "written":
            initialize(block, prefix=f"model.layers.{number}")
        elif META_INIT:
            fill(block)
        if TENSOR > 1:
            divide_block(block, mesh["tensor"])
        if BLOCKS_PER_UNIT == 1:
            fully_shard(block, reshard_after_forward=RESHARD_AFTER_FORWARD, **settings)
        elif number % BLOCKS_PER_UNIT == BLOCKS_PER_UNIT - 1 or block is blocks[-1]:
            members = blocks[number - number % BLOCKS_PER_UNIT : number + 1]
            fully_shard(members, reshard_after_forward=RESHARD_AFTER_FORWARD, **settings)
    if MODEL == "written":
        initialize(model)
    elif META_INIT:
        fill(model)
    if TENSOR > 1:
        divide_ends(model, mesh["tensor"])
    # Used first and last: resharding in between would only gather it twice.
    fully_shard(model, reshard_after_forward=False, **settings)
    if BACKWARD_PREFETCH != 1 or FORWARD_PREFETCH > 0:
        prefetch(model, blocks if BLOCKS_PER_UNIT == 1 else blocks[::BLOCKS_PER_UNIT])


def prefetch(model: Any, units: list[Any]) -> None:
    """Say which units are gathered while another one computes."""
    if BACKWARD_PREFETCH != 1:
        order = [*units, model]
        for index, unit in enumerate(order):
            ahead = order[max(0, index - BACKWARD_PREFETCH) : index][::-1]
            # An empty list means the default; a unit that prefetches itself prefetches none.
            unit.set_modules_to_backward_prefetch(ahead or [unit])
    if FORWARD_PREFETCH > 0:
        for index, unit in enumerate(units):
            ahead = units[index + 1 : index + 1 + FORWARD_PREFETCH]
            unit.set_modules_to_forward_prefetch(ahead)


def fix_buckets(model: DistributedDataParallel) -> None:
    """Let DDP form its final buckets now: a process else does so after its first step.

    With 3 or more ranks the order in which a gradient is summed depends on its place in a bucket.
    Only the order in which gradients arrive decides; the next forward pass makes the buckets.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    model.reducer.prepare_for_backward([])
    for parameter in reversed(trained):
        torch.autograd.backward(parameter, torch.zeros_like(parameter))
    for parameter in trained:
        parameter.grad = None


def build_model() -> Any:
    """The model with its first weights, sharded if it is to be."""
    if MODEL != "written" and not META_INIT:
        torch.manual_seed(SEED)
    with torch.device("meta" if ON_META else DEVICE):
        model: Any = Transformer().to(MASTER_DTYPE) if MODEL == "written" else build()
    if CHUNKED_LOSS and MODEL != "written":
        compute_loss_in_chunks(model)
    if KIND == "sharded":
        shard(model)
        return model
    if MODEL == "written":
        initialize(model)
    elif META_INIT:
        Initializer(model)(model)
    if RECOMPUTE != "none" or COMPILE:
        blocks = find_blocks(model) if BLOCKS is None else list(model.get_submodule(BLOCKS))
        recompute_and_compile(blocks)
    if WRAPS_DDP:
        model = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            **({"bucket_cap_mb": BUCKET_MIB} if BUCKET_MIB is not None else {}),
            **({"forward_sync_buffers": SYNCS_BUFFERS} if not SYNCS_BUFFERS else {}),
        )
        fix_buckets(model)
        if COMPRESS is not None:
            compress_gradients(model)
    return model
