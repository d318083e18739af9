"""A step under a strategy, counted by operation and axis, and traced by the profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.loss import loss_of
from shardwise.engine.mesh import resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.engine.wrapped import axes_of
from shardwise.observe.rank.axes import MESH
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.trainer.clip import clip_gradients
from shardwise.trainer.profile import mesh_metadata
from tests.units.reduced import build


def trace_step(case: dict[str, Any]) -> list[tuple[str, int, str, int, int]]:
    """Operation, group size, axis, calls and bytes; writes rank0.json and so on."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = resolve_for_world(Strategy.model_validate(case["strategy"]))
    model = parallelize(build(spec, device="cpu", attention="sdpa"), strategy)
    ids, loss_sum = torch.randint(0, spec.vocab, (1, 64)), loss_of(model)

    def step() -> None:
        with micro_batch(model):
            loss_sum(ids, ids).backward()
        clip_gradients(model.parameters(), 1.0)
        model.zero_grad()

    # DDP makes its buckets anew after the first.
    step()
    step()
    with CollectiveCounter(axes_of(model)) as counter:
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        profiler.add_metadata_json(MESH, mesh_metadata(strategy))
        step()
    profiler.export_chrome_trace(f"{case['folder']}/rank{world()[0]}.json")
    return [(*key, *count) for key, count in counter.counts.items()]
