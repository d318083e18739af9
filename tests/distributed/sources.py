"""Data and models that tests name by `package.module:function`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

VOCAB, SEQ_LEN = 64, 16
POISON = VOCAB - 1


def equal(rank: int, world: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.arange(SEQ_LEN + 1).repeat(2, 1) % POISON


def unequal(rank: int, world: int) -> Iterator[torch.Tensor]:
    """Rank 1 has one micro-batch less: five instead of six."""
    for _ in range(6 - rank):
        yield torch.arange(SEQ_LEN + 1).repeat(2, 1) % POISON


def poisoned(rank: int, world: int) -> Iterator[torch.Tensor]:
    """The fourth batch of rank 1 alone holds the token that breaks `fragile`."""
    for number in range(12):
        ids = torch.arange(SEQ_LEN + 1).repeat(2, 1) % POISON
        if number == 3 and rank == 1:
            ids[0, 3] = POISON
        yield ids


class Fragile(nn.Module):
    """Its loss is not a number for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        broken = (ids == POISON).to(x.dtype)[..., None]
        return self.head(x / (1 - broken))


def fragile() -> nn.Module:
    return Fragile()
