"""Stacked experts: gradients under a strategy, and models that other code has sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.mesh import resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.wrapped import axes_of
from shardwise.integrations.watch import StepWatch
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from tests.distributed.checkpoint_run import Tied, digest, full, local
from tests.units.reduced import build

GLOBAL_SEQUENCES, SEQ_LEN = 4, 16
CPU = torch.device("cpu")


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients(case: dict[str, Any]) -> dict[str, Any]:
    """Initial weights, loss, gradients, their norm and the placements, as rank 0 sees them.

    Every rank takes its own part of one global batch. Experts run one by one: grouped matrix
    products have no fp64.
    """
    spec = ModelSpec.model_validate(case["model"])
    strategy = resolve_for_world(Strategy.model_validate(case["strategy"]))
    module = build(spec, device="meta", attention="sdpa")
    module.set_experts_implementation("eager")
    model = parallelize(module, strategy, device=CPU, seed=3)
    initial = {name: digest(full(p)) for name, p in model.named_parameters()}
    rank, size = world()
    data = torch.Generator().manual_seed(1)
    batch = torch.randint(0, spec.vocab, (GLOBAL_SEQUENCES, SEQ_LEN), generator=data)
    mine = batch.chunk(size)[rank]
    # The loss of transformers is in fp32.
    logits = model(input_ids=mine).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    found = [full(grad).flatten().tolist() for grad in grads_of(model)]
    norm = full(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)).item()
    clipped = sum(float(full(grad).square().sum()) for grad in grads_of(model)) ** 0.5
    placements = [p.placements[-1] for p in model.parameters() if isinstance(p, DTensor)]
    dims = {placed.dim for placed in placements if isinstance(placed, Shard)}
    return {
        "initial": initial,
        "loss": mean.item() / size,
        "gradients": [value for values in found for value in values],
        "norm": norm,
        "clipped": clipped,
        "dims": sorted(dims),
    }


def wrapped(case: dict[str, Any]) -> dict[str, Any]:
    """A step of a model that other code sharded, predicted and counted."""
    model = Tied()
    ids = torch.zeros((2, SEQ_LEN), dtype=torch.int64)
    watch = StepWatch(model, seq_len=SEQ_LEN, micro_batch=2, clips=False, inputs=(ids,))

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(case["dim"]) if parameter.ndim == 3 else None

    for layer in model.layers:
        fully_shard(layer, shard_placement_fn=place)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    watch.start(model, optimizer)
    counter = CollectiveCounter(axes_of(model))
    with counter:
        model(ids).logsumexp(-1).mean().backward()
    assert watch.predicted is not None
    return {
        "predicted": {
            f"{one.op}/{one.group_size}/{one.group}": (one.calls, one.bytes)
            for one in watch.predicted.traffic
        },
        "counted": {
            f"{op}/{size}/{axis}": tuple(n) for (op, size, axis), n in counter.counts.items()
        },
        "parameter_bytes": watch.predicted.known_memory.terms["parameters"],
        "held_bytes": sum(local(p).nbytes for p in model.parameters()),
    }
