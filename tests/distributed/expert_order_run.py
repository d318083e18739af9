"""Steps with divided experts: the order of their collectives, and what they compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.parallelize import parallelize
from shardwise.engine.wrapped import axes_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES
from tests.distributed.engine_run import local, route_evenly, step
from tests.units.reduced import build


class Order(CollectiveCounter):  # type: ignore[misc]
    """The collectives of a step, one by one: operation, axis and bytes."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__(axes)
        self.calls: list[tuple[str, str, int]] = []

    def _add(self, name: str, size: int, group: dist.ProcessGroup) -> None:
        if group.size() > 1:
            self.calls.append((name, self._axis(name, group), size))


def ordered(case: dict[str, Any]) -> dict[str, Any]:
    """The collectives of the second step in order, and the parameters after it."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    torch.manual_seed(0)
    built = build(spec, device="cpu", attention="sdpa")
    module = parallelize(built.to(TORCH_DTYPES[strategy.kept_dtype]), strategy)
    route_evenly(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    ids = torch.randint(0, spec.vocab, (strategy.micro_batch, case["seq_len"]))
    step(module, optimizer, ids, strategy)
    order = Order(axes_of(module))
    with order:
        step(module, optimizer, ids, strategy)
    return {
        "calls": order.calls,
        "parameters": [local(p.detach()).flatten().tolist() for p in module.parameters()],
    }
