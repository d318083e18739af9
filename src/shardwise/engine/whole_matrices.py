"""Adafactor and Muon. Their updates need full matrices, so they run on one device or replicated."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.low_bit import is_cancelled


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, with updates that `found_inf` can cancel."""

    found_inf: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        """Update the parameters, unless `found_inf` cancels it; reset `found_inf`."""
        # torch's step reads `found_inf` too and cannot handle this flag, so it is removed first.
        cancelled, self.found_inf = self.found_inf, None
        return None if is_cancelled(cancelled) else super().step(closure)  # type: ignore[no-untyped-call]


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of the blocks, and its AdamW for all other parameters."""

    found_inf: torch.Tensor | None = None

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        # Groups and states are shared, so schedules and checkpoints see a single optimizer.
        self._parts = (muon, adamw)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters with both optimizers, unless `found_inf` cancels it."""
        if not is_cancelled(self.found_inf):
            for part in self._parts:
                part.step()  # type: ignore[no-untyped-call]
