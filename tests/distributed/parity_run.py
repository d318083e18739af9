"""Train six steps in fp64 under a strategy and return the parameters.

Every rank takes its own part of one global batch, so that any number of processes trains on the
same data.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.mesh import resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.trials.accept.parity import full_tensor
from tests.units.reduced import build

STEPS, GLOBAL_SEQUENCES, SEQ_LEN = 6, 8, 16


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients, by the names that parameters have without DDP."""
    return {
        name.removeprefix("module."): full_tensor(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def train(case: dict[str, Any]) -> list[float]:
    """Every parameter after the last step, in one list; empty on ranks other than 0."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = resolve_for_world(Strategy.model_validate(case["strategy"]))
    torch.manual_seed(0)
    model = parallelize(build(spec, device="cpu", attention="sdpa").double(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, size = world()
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randint(0, spec.vocab, (GLOBAL_SEQUENCES, SEQ_LEN), generator=data)
        mine = batch.chunk(size)[rank].chunk(strategy.accumulate)
        for index, ids in enumerate(mine):
            with micro_batch(model, last=index == strategy.accumulate - 1):
                loss = model(input_ids=ids, labels=ids).loss / strategy.accumulate
                loss.backward()
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    parameters = torch.cat([full_tensor(p.detach()).flatten() for p in model.parameters()])
    return [] if rank else parameters.tolist()
