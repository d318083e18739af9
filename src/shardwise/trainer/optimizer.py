"""Create the optimizer of a run from the parameters of a sharded model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.sgd import sgd

from shardwise.engine.host_optimizer import HostOptimizer
from shardwise.engine.local_parts import is_tensor_parallel
from shardwise.engine.low_bit import make_low_bit
from shardwise.engine.parallelize import check_optimizer
from shardwise.engine.sync import is_parallel, strategy_of
from shardwise.engine.whole_matrices import Adafactor, MuonWithAdamW
from shardwise.pytorch.blocks import find_blocks
from shardwise.spec.optimizer import LOW_BIT, ON_HOST, Optimizer, is_muon_matrix
from shardwise.spec.optimizer_sharding import Sharding, check_sharding, check_states
from shardwise.spec.record import SpecError
from shardwise.spec.train import TrainSettings
from shardwise.units.module import TORCH_DTYPES


def make_optimizer(
    model: nn.Module, kind: Optimizer, settings: TrainSettings
) -> torch.optim.Optimizer:
    """Create the optimizer `kind`, with torch's fused kernel if there is one.

    A flag (`found_inf`) cancels an update: fused optimizers read it on the device, for others the
    host waits. Weight decay applies to matrices, not to norms and biases. With states
    bf16+stochastic, torchao rounds updates at random, by numbers that follow from the run's seed.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    check_sharding(kind, _sharding_of(trained))
    strategy = strategy_of(model) if is_parallel(model) else None
    if strategy is not None:
        check_states(kind, strategy)
    stochastic = strategy is not None and strategy.states == "bf16+stochastic"
    groups = _groups(trained, settings)
    rate = settings.learning_rate
    adaptive: dict[str, Any] = {
        "lr": rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
    }
    optimizer: torch.optim.Optimizer
    if kind in LOW_BIT or stochastic:
        seed = settings.seed if stochastic else None
        optimizer = make_low_bit(kind, groups, stochastic_seed=seed, **adaptive)
    elif kind in ON_HOST:
        make = partial(_make_fused, kind, settings=settings, adaptive=adaptive)
        if strategy is not None and strategy.offloads("optimizer"):
            master = TORCH_DTYPES[strategy.master_dtype]
            optimizer = HostOptimizer(groups, make, master, ON_HOST[kind])
        else:
            optimizer = make(groups)
    elif kind == "adafactor":
        optimizer = Adafactor(groups, lr=rate)
    elif kind == "muon":
        optimizer = _muon(model, trained, settings, adaptive)
    else:
        raise SpecError(f"job.optimizer: torch has no '{kind}' optimizer; use adamw")
    check_optimizer(optimizer, model)
    return optimizer


def _make_fused(
    kind: Optimizer,
    groups: list[dict[str, Any]],
    *,
    settings: TrainSettings,
    adaptive: dict[str, Any],
) -> torch.optim.Optimizer:
    """An optimizer with torch's fused kernel: AdamW, Adam or SGD."""
    if kind == "adamw":
        return torch.optim.AdamW(groups, **adaptive, fused=True)
    if kind == "adam":
        return torch.optim.Adam(groups, **adaptive, fused=True)
    momentum = settings.momentum if kind == "momentum" else 0.0
    return _FusedSGD(groups, lr=settings.learning_rate, momentum=momentum)


def _sharding_of(parameters: list[nn.Parameter]) -> Sharding:
    """Whether any parameter is sharded, and whether any is split by tensor parallelism."""
    return Sharding(
        sharded=any(isinstance(parameter, DTensor) for parameter in parameters),
        tensor=any(is_tensor_parallel(parameter) for parameter in parameters),
    )


def _groups(parameters: list[nn.Parameter], settings: TrainSettings) -> list[dict[str, Any]]:
    """Parameter groups: matrices with weight decay, other parameters without; none is empty."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _muon(
    model: nn.Module,
    trained: list[nn.Parameter],
    settings: TrainSettings,
    adaptive: dict[str, Any],
) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, AdamW for the rest.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate serves both.
    """
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    blocks = find_blocks(unwrapped).values()
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    matrices = [p for p in trained if is_muon_matrix(p.ndim, id(p) in in_blocks)]
    others = [p for p in trained if not is_muon_matrix(p.ndim, id(p) in in_blocks)]
    if not matrices or not others:
        raise SpecError(
            "job.optimizer: muon updates matrices of the blocks, and needs parameters besides "
            "them; use adamw"
        )
    muon = torch.optim.Muon(
        matrices,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, torch.optim.AdamW(_groups(others, settings), **adaptive))


class _FusedSGD(torch.optim.SGD):
    """Torch's fused SGD kernel, applied to the local shards.

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
        """The momentum buffer of a parameter, created with zeros at its first use."""
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set gradients to None; under DDP, where they are views of its buckets, to zero.

    DDP would replace removed views by new tensors until the next reduction: a second copy of all
    gradients while micro-batches accumulate.
    """
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
