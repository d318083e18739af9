"""Adafactor and Muon, whose updates need whole matrices: on one device, or replicated."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.low_bit import is_cancelled


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
