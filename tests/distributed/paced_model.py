"""A small model whose micro-batches take as long on each rank as a test says.

A rank of a given speed, on a machine that others use: what a micro-batch takes less, the rank
sleeps. All else is real: processes, collectives, the loop.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from shardwise.engine.mesh import world
from tests.distributed.sources import SEQ_LEN, VOCAB

# Seconds of a micro-batch by rank, such as "0.3,0.6".
PACES = "SHARDWISE_TEST_PACES"


class _Paced(torch.autograd.Function):
    """The identity, whose backward, the last of a micro-batch, ends at its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: float) -> torch.Tensor:
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(max(0.0, ctx.end - time.monotonic()))
        return gradients[0], None


class Paced(nn.Module):
    """Predicts tokens from embeddings, at the pace of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, SEQ_LEN)
        self.layers = nn.ModuleList([nn.Linear(SEQ_LEN, SEQ_LEN) for _ in range(3)])
        self.head = nn.Linear(SEQ_LEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if PACES in os.environ and not x.is_meta:
            pace = float(os.environ[PACES].split(",")[world()[0]])
            x = _Paced.apply(x, time.monotonic() + pace)  # type: ignore[no-untyped-call]
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def paced() -> nn.Module:
    return Paced()
