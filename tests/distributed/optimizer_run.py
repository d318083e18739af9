"""Train a small model for a few steps with an optimizer, on the ranks of `Workers`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.loss import loss_of
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.trainer.optimizer import clear_gradients, make_optimizer
from tests.units.reduced import build

BATCH, SEQ_LEN = 4, 32


def optimizers_made(case: dict[str, Any]) -> list[str]:
    """Those of the case's optimizers that the trainer makes for one strategy."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    model = parallelize(build(spec, device="cpu", attention="sdpa"), strategy)
    made = []
    for optimizer in case["optimizers"]:
        with contextlib.suppress(SpecError):
            make_optimizer(model, optimizer, TrainSettings())
            made.append(optimizer)
    return made


def losses_of(case: dict[str, Any]) -> list[float]:
    """The mean loss of the same global batch in every step."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    torch.manual_seed(0)
    model = parallelize(build(spec, device="cpu", attention="sdpa"), strategy)
    optimizer = make_optimizer(model, case["optimizer"], TrainSettings(learning_rate=1e-3))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, spec.vocab, (BATCH, SEQ_LEN), generator=generator)
    rank, world = dist.get_rank(), dist.get_world_size()
    own = ids[rank * BATCH // world : (rank + 1) * BATCH // world]
    losses = []
    for _ in range(case["steps"]):
        with micro_batch(model, last=True):
            loss = loss_of(model)(own, own) / own.numel()
            loss.backward()
        optimizer.step()
        clear_gradients(model, optimizer)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
    return losses
