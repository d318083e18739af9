"""Measure the peak of every rank while routers prefer the experts of one rank of each group."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from shardwise.engine.expert import is_divided_expert, stacked_experts
from shardwise.engine.ledger import LiveBytes
from shardwise.engine.mesh import EXPERT
from shardwise.engine.parallelize import parallelize
from shardwise.engine.routing_load import RoutingLoad
from shardwise.engine.sync import strategy_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES
from tests.distributed.engine_run import step
from tests.units.reduced import build

# Choices after which the pattern of chosen experts repeats, and steps of which the lowest counts.
PATTERN, STEPS = 16, 3


def prefer(module: nn.Module, busiest: int, load: float) -> None:
    """Choose experts so that rank `busiest` of each expert group gets `load` times the mean."""
    degree = strategy_of(module).expert

    def chosen_by(experts: Any) -> torch.Tensor:
        """One pattern of chosen experts: those of one rank take turns."""
        most = round(PATTERN * load / degree)
        others = (PATTERN - most) // (degree - 1)
        assert most + others * (degree - 1) == PATTERN
        return torch.cat(
            [
                rank * experts.num_experts
                + torch.arange(most if rank == busiest else others) % experts.num_experts
                for rank in range(degree)
            ]
        )

    def uneven(experts: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        tokens, chosen, weights = args
        pattern = chosen_by(experts)
        return tokens, pattern.repeat(chosen.numel() // PATTERN).view(chosen.shape), weights

    for _, experts in stacked_experts(module):
        experts.register_forward_pre_hook(uneven)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes of this rank, its number in its expert group, and the load as metrics have it."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    torch.manual_seed(0)
    built = build(spec, device="cpu", attention="sdpa").to(TORCH_DTYPES[strategy.kept_dtype])
    module = parallelize(built, strategy)
    prefer(module, case["busiest"], case["load"])
    load = RoutingLoad.of(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, spec.vocab, (strategy.micro_batch, case["seq_len"]))
    step(module, optimizer, ids, strategy)
    gc.collect()
    peaks = []
    with LiveBytes() as live:
        # When the machine is busy, Gloo lets go of tensors late, which can only add to a peak.
        for _ in range(STEPS):
            live.reset()
            step(module, optimizer, ids, strategy)
            peaks.append(live.peak_bytes)
    divided: Any = next(p for p in module.parameters() if is_divided_expert(p))
    return {
        "peak_bytes": min(peaks),
        "number": divided.device_mesh.get_local_rank(EXPERT),
        "metrics": load.take(),
    }
