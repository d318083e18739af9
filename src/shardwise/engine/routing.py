"""How many tokens a router sends to each expert."""

from __future__ import annotations

import torch


def tokens_of_experts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """The number of tokens that chose each of `experts` experts, without waiting for the device."""
    flat = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))
