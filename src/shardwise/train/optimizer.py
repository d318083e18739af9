"""Create the optimizer of a run from the parameters of a sharded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.sgd import sgd

from shardwise.engine.parallelize import check_optimizer
from shardwise.spec.job import Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.train import TrainSettings


def make_optimizer(
    model: nn.Module, kind: Optimizer, settings: TrainSettings
) -> torch.optim.Optimizer:
    """Create a fused optimizer: no temporaries, and an update that a device flag can cancel.

    Weight decay applies to matrices, not to norms and biases.
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
        optimizer = _FusedSGD(groups, lr=rate, momentum=momentum)
    else:
        raise SpecError(f"job.optimizer: torch has no '{kind}' optimizer; use adamw")
    check_optimizer(optimizer, model)
    return optimizer


class _FusedSGD(torch.optim.SGD):
    """Torch's fused SGD kernel on the local shards.

    `torch.optim.SGD(fused=True)` does not accept DTensors, and leaves its momentum buffers
    uninitialised if the first update is cancelled. Buffers of zeros give the same first update.
    """

    # On the device: 1 cancels the update. The host never reads it.
    found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            buffers: list[torch.Tensor | None] = [None] * len(parameters)
            if group["momentum"]:
                buffers = [_local(self._momentum_buffer(p)) for p in parameters]
            sgd(
                [_local(p) for p in parameters],
                [_local(p.grad) for p in parameters],
                buffers,
                fused=True,
                found_inf=self.found_inf,
                lr=group["lr"],
                momentum=group["momentum"],
                weight_decay=group["weight_decay"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
        return None

    def _momentum_buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set gradients to None; under DDP, where they are views of its buckets, to zero.

    DDP would replace removed views by new tensors until the next reduction: a second copy of all
    gradients while micro-batches accumulate.
    """
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
