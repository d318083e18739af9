"""What a user brings: a model and its data, which a script imports."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def build() -> nn.Module:
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
    return nn.Sequential(nn.Embedding(32, 16), *layers, nn.Linear(16, 32))


def batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, 32, (2, 33), generator=generator)
