"""The optimizer, its learning rate, and the norm of the gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from shardwise.stacks.program.settings import (
    BETAS,
    EPSILON,
    FINAL_SHARE,
    FUSED,
    KIND,
    LEARNING_RATE,
    MOMENTUM,
    OPTIMIZER,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    STEPS,
    TENSOR,
    WARMUP_STEPS,
    WEIGHT_DECAY,
)


def make_optimizer(model: nn.Module) -> Any:
    """Weight decay applies to matrices, not to norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if OPTIMIZER == "adamw":
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)
    if OPTIMIZER == "adam":
        return torch.optim.Adam(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)
    if FUSED:
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
    return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM)


def learning_rate(step: int) -> float:
    if WARMUP_STEPS > 0 and step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    if SCHEDULE == "constant":
        return LEARNING_RATE
    if WARMUP_STEPS > 0:
        share = (step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    else:
        share = step / STEPS
    left = 1 - share
    if SCHEDULE == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * share))
    return LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * left)


def by_mesh(model: nn.Module) -> list[list[Any]]:
    """Parameters with a gradient, by mesh: that of norms is not that of divided matrices."""
    groups: dict[DeviceMesh, list[Any]] = {}
    parameters: Any = model.parameters()
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(parameter.grad.device_mesh, []).append(parameter)
    return list(groups.values())


def gradient_norm(model: nn.Module) -> Any:
    """The global norm of the gradients, over all ranks."""
    if TENSOR > 1 and not SEQUENCE_PARALLEL:
        norms: list[Any] = [get_total_norm([p.grad for p in group]) for group in by_mesh(model)]
        return torch.linalg.vector_norm(torch.stack([norm.full_tensor() for norm in norms]))
    norm: Any = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if KIND == "sharded":
        # The norm of a sharded gradient is sharded too.
        return norm.full_tensor()
    return norm
