"""Train a mixture of experts for six steps in fp64, as the trainer does, under any strategy."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.loss import loss_of
from shardwise.engine.mesh import data_rank, resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch, parallel_axes
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import by_operation
from shardwise.trainer.clip import clip_gradients
from shardwise.trainer.measure import norm_traffic
from shardwise.trials.accept.parity import full_tensor
from tests.distributed.expert_models import VOCAB, build, initialise

STEPS, GLOBAL_SEQUENCES, SEQ_LEN = 6, 8, 16
FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Parameters before and after, norms of the gradient and the loss of each step, on rank 0."""
    strategy = resolve_for_world(Strategy.read({**FP64, **case["strategy"]}))
    module = build(case["family"], **case.get("config", {}))
    fill = initialise(module, case["routing"])
    model = parallelize(module, strategy, device=torch.device("cpu"), fill=fill, seed=3)
    first = flat(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_sum, (rank, size) = loss_of(model, case.get("balance_loss", "none")), world()
    share = size / (GLOBAL_SEQUENCES * SEQ_LEN)
    data = torch.Generator().manual_seed(1)
    norms, losses = [], []
    for _ in range(STEPS):
        batch = torch.randint(0, VOCAB, (GLOBAL_SEQUENCES, SEQ_LEN + 1), generator=data)
        mine = batch.chunk(strategy.data_parallel)[data_rank(strategy)]
        parts = mine.chunk(strategy.accumulate)
        for number, ids in enumerate(parts):
            with micro_batch(model, last=number == strategy.accumulate - 1):
                loss = loss_sum(ids[:, :-1], ids[:, 1:]) * share
                loss.backward()
            losses.append(loss.detach())
        counter = CollectiveCounter(parallel_axes(model))
        with counter:
            norms.append(clip_gradients(model.parameters(), case["clip"]).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    total = torch.stack(losses).sum()
    if size > 1:
        torch.distributed.all_reduce(total)
    last = flat(model)
    if rank:
        return {}
    return {
        "first": first,
        "last": last,
        "norms": norms,
        "loss": total.item() / size,
        "norm_traffic": {key: tuple(count) for key, count in counter.counts.items()},
        "predicted_norm_traffic": by_operation(norm_traffic(strategy, model)),
    }


def flat(model: torch.nn.Module) -> list[float]:
    """All parameters, unsharded, in one list."""
    return torch.cat([full_tensor(p.detach()).flatten() for p in model.parameters()]).tolist()
