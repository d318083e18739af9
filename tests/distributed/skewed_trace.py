"""Profile steps of a mixture of experts whose routers give each rank a stated share of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise.engine.mesh import world
from shardwise.engine.parallelize import parallelize
from shardwise.observe.rank.axes import MESH
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.trainer.profile import mesh_metadata
from shardwise.units.module import TORCH_DTYPES
from tests.distributed.engine_run import route_evenly, step
from tests.distributed.skewed_run import prefer
from tests.units.reduced import build

STEPS = 3


def trace_case(case: dict[str, Any]) -> None:
    """Write rank0.json and so on: STEPS steps, routed evenly where `load` is 1."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    torch.manual_seed(0)
    built = build(spec, device="cpu", attention="sdpa").to(TORCH_DTYPES[strategy.kept_dtype])
    module = parallelize(built, strategy)
    if case["load"] == 1:
        route_evenly(module)
    else:
        prefer(module, case["busiest"], case["load"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, spec.vocab, (strategy.micro_batch, case["seq_len"]))
    written = Path(case["folder"]) / f"rank{world()[0]}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=2, active=STEPS),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(written)),
    ) as profiler:
        profiler.add_metadata_json(MESH, mesh_metadata(strategy))
        for _ in range(2 + STEPS):
            step(module, optimizer, ids, strategy)
            profiler.step()
