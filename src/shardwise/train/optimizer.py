"""The optimizer of a run, made from the parameters of a model that is ready to train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.parallelize import check_optimizer
from shardwise.spec.job import Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.train import TrainSettings


def make_optimizer(
    model: nn.Module, kind: Optimizer, settings: TrainSettings
) -> torch.optim.Optimizer:
    """Fused: one pass over the state, no temporaries, and an update that a flag can call off.

    Weight decay is for matrices; norms and biases go without.
    """
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate = settings.learning_rate
    adaptive: dict[str, Any] = {
        "lr": rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "fused": True,
    }
    optimizer: torch.optim.Optimizer
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, **adaptive)
    elif kind == "adam":
        optimizer = torch.optim.Adam(groups, **adaptive)
    elif kind in ("sgd", "momentum"):
        momentum = settings.momentum if kind == "momentum" else 0.0
        sharded = any(isinstance(p, DTensor) for p in model.parameters())
        if sharded:
            optimizer = _ShardedSGD(groups, lr=rate, momentum=momentum, foreach=False)
        else:
            optimizer = torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=True)
    else:
        raise SpecError(f"job.optimizer: torch has no '{kind}' to train with; choose adamw")
    check_optimizer(optimizer, model)
    return optimizer


class _ShardedSGD(torch.optim.SGD):
    """Torch has no fused SGD for DTensors: the flag that calls an update off is read here."""

    found_inf: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        called_off, self.found_inf = self.found_inf, None
        if called_off is not None and called_off.item():
            return None
        return super().step(closure)


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Drop them; under DDP, where they are views of its buckets, set them to zero.

    Dropped views would be replaced by tensors of their own until the next reduction: a second
    copy of all gradients while micro-batches accumulate.
    """
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
