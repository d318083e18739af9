"""Train under a strategy with tensor or context parallelism, with real ranks."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.local_parts import is_tensor_parallel
from shardwise.engine.loss import loss_of
from shardwise.engine.mesh import resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.engine.wrapped import axes_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import by_operation
from shardwise.trainer.clip import clip_gradients
from shardwise.trainer.measure import norm_traffic
from shardwise.trials.accept.parity import batch_of, train_exactly
from tests.distributed.checkpoint_run import digest
from tests.units.reduced import build


def digests_of_undivided(case: dict[str, Any]) -> list[str]:
    """Train a step with dropout; digests of the parameters that every process has whole."""
    spec = ModelSpec.model_validate(case["model"])
    torch.manual_seed(0)
    module = build(spec, device="cpu", attention="sdpa")
    model = parallelize(module, resolve_for_world(Strategy.model_validate(case["strategy"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = batch_of(0, spec.vocab, packed=False)[0]
    before = [digest(p) for p in model.parameters() if not is_tensor_parallel(p)]
    with micro_batch(model):
        loss_of(model)(ids, ids).backward()
    optimizer.step()
    after = [digest(p) for p in model.parameters() if not is_tensor_parallel(p)]
    assert not set(before) & set(after)
    return after


def traffic_of_norm(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collectives of the gradient norm, counted and predicted."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = resolve_for_world(Strategy.model_validate(case["strategy"]))
    model = parallelize(build(spec, device="cpu", attention="sdpa"), strategy)
    ids = batch_of(0, spec.vocab, packed=False)[0]
    with micro_batch(model):
        loss_of(model)(ids, ids).backward()
    with CollectiveCounter(axes_of(model)) as counter:
        clip_gradients(model.parameters(), 1.0)
    predicted = by_operation(norm_traffic(strategy, model))
    return (
        {"/".join(map(str, key)): tuple(count) for key, count in counter.counts.items()},
        {"/".join(map(str, key)): both for key, both in predicted.items()},
    )


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Every parameter after the last step, in one list, and the losses; empty but on rank 0."""
    found = train_exactly(
        ModelSpec.model_validate(case["model"]),
        resolve_for_world(Strategy.model_validate(case["strategy"])),
        torch.device("cpu"),
        clip_norm=case["clip"],
        packed=case.get("packed", False),
        meta=case.get("meta", False),
    )
    return {} if world()[0] else {"parameters": found.parameters.tolist(), "losses": found.losses}
