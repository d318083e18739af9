"""Adafactor and Muon, whose updates need whole matrices: on one device, or replicated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.local_parts import is_divided
from shardwise.engine.low_bit import is_cancelled
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.record import SpecError


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, whose update can be cancelled."""

    found_inf: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        # torch's own reading of `found_inf` accepts no flag.
        cancelled, self.found_inf = self.found_inf, None
        return None if is_cancelled(cancelled) else super().step(closure)  # type: ignore[no-untyped-call]


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of the blocks, and its AdamW for everything else."""

    found_inf: torch.Tensor | None = None

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        # Groups and states are those of both: learning rates and checkpoints see one optimizer.
        self._parts = (muon, adamw)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not is_cancelled(self.found_inf):
            for part in self._parts:
                part.step()  # type: ignore[no-untyped-call]


def check_replicated(kind: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise SpecError for sharded or divided parameters.

    torch 2.13's Adafactor fails on DTensors. Its Muon runs on them, with more than ten collectives
    for every matrix and step.
    """
    if any(isinstance(p, DTensor) or is_divided(p) for p in parameters):
        raise SpecError(
            f"job.optimizer: {kind} needs whole matrices, and this strategy divides them; use "
            "strategy ddp, or adamw-8bit, whose states are small too"
        )
