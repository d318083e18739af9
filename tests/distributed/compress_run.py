"""Average known gradients with DDP's communication hooks, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.engine.compress import compression_state, restore_compression
from shardwise.engine.parallelize import parallelize
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES

# Rows and columns of the two matrices, and elements of the vector, of the model.
FIRST, SECOND, VECTOR = (48, 64), (80, 32), 64


class Matrix(nn.Module):
    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))


class Known(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        layers = [Matrix(FIRST, dtype), Matrix(SECOND, dtype)]
        self.layers = nn.ModuleList(layers)
        self.vector = nn.Parameter(torch.zeros(VECTOR, dtype=dtype))
        self.held = [*(layer.weight for layer in layers), self.vector]

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        parts = zip(self.held, gradients, strict=True)
        return torch.stack([(p * g).sum() for p, g in parts]).sum()


def gradients_of(rank: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank computes in a step: full matrices of random numbers."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
        for shape in (FIRST, SECOND, (VECTOR,))
    ]


def average(case: dict[str, Any]) -> list[list[list[float]]]:
    """The averaged gradients of each step, flat; a new process follows on each step of `again`."""
    strategy = Strategy.model_validate(case["strategy"])
    dtype = TORCH_DTYPES[strategy.master_dtype]
    rank = torch.distributed.get_rank()
    known = Known(dtype)
    model = parallelize(known, strategy)
    averaged = []
    for step in range(case["steps"]):
        if step in case.get("again", ()):
            kept = {name: one.clone() for name, one in compression_state(model).items()}
            known = Known(dtype)
            model = parallelize(known, strategy)
            restore_compression(model, step, kept)
        model(gradients_of(rank, step, dtype)).backward()
        gradients = [p.grad for p in known.held if p.grad is not None]
        averaged.append([one.double().flatten().tolist() for one in gradients])
        model.zero_grad()
    return averaged
