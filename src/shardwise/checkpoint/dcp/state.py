"""The state of a training run as named tensors, independent of world size and strategy.

Only tensors are saved: the step determines learning rates and the order of the data, and the
run.toml the settings. So resuming needs no unpickling.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.format.pieces import Tensor
from shardwise.engine.local_parts import as_dtensor_like
from shardwise.engine.low_bit import restore_parts, saved_parts
from shardwise.pytorch.adapted import adapter_of
from shardwise.pytorch.device import random_states, set_random_states
from shardwise.pytorch.private import WRAPPER_PREFIXES

MODEL, OPTIMIZER, RANK = "model", "optimizer", "rank"
RANDOM_PREFIX = "random."


def plain_name(name: str) -> str:
    """Name of a parameter in the unwrapped model."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names in the unwrapped model; tied parameters appear once."""
    return {plain_name(name): p for name, p in _unwrapped(model).named_parameters()}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a checkpoint holds: all, or only the trained ones of an adapted model.

    The frozen parameters are loaded from the same files or built from the same seed again; the
    manifest identifies them.
    """
    adapted = adapter_of(model) is not None
    return {n: p for n, p in parameters_of(model).items() if p.requires_grad or not adapted}


def updated_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Tensors that only an optimizer step changes: parameters and their optimizer states."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in saved_parameters(model).items():
        tensors[f"{MODEL}.{name}"] = as_dtensor_like(parameter, parameter.detach())
        # Sorted, since the order decides which rank writes what.
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                full = f"{OPTIMIZER}.{name}.{key}"
                parts = saved_parts(value)
                tensors |= {f"{full}.{part}": rows for part, rows in parts.items()}
                if not parts:
                    tensors[full] = as_dtensor_like(parameter, value)
    return tensors


def restore_quantised(
    model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, torch.Tensor]
) -> None:
    """Set the quantised states of an optimizer; `loaded` has `updated_tensors` by name."""
    for name, parameter in parameters_of(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and (parts := saved_parts(value)):
                full = f"{OPTIMIZER}.{name}.{key}"
                restore_parts(value, {part: loaded[f"{full}.{part}"] for part in parts})


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers by name, which a forward pass may change."""
    unwrapped = _unwrapped(model)
    persistent = set(unwrapped.state_dict().keys())
    return {
        f"{MODEL}.{plain_name(name)}": buffer
        for name, buffer in unwrapped.named_buffers()
        if name in persistent
    }


def rank_state(
    rank: int, device: torch.device, more: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """State of one rank alone by name: its random number generators, and `more`."""
    random = {f"{RANDOM_PREFIX}{kind}": state for kind, state in random_states(device).items()}
    tensors = {**more, **random}
    return {f"{RANK}.{rank}.{name}": tensor for name, tensor in tensors.items()}


def restore_random(rank_state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the random number generators of this process from its `rank_state`."""
    states = {
        name.removeprefix(RANDOM_PREFIX): state
        for name, state in rank_state.items()
        if name.startswith(RANDOM_PREFIX)
    }
    set_random_states(states, device)


def allocate_rank_state(saved: Mapping[str, Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Uninitialised tensors to load the state of one rank into, by name."""
    prefix = f"{RANK}.{rank}."
    return {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in saved.items()
        if name.startswith(prefix)
    }


def make_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]
) -> None:
    """Allocate optimizer states like the saved ones, before the optimizer's first step.

    A state of the parameter's shape is sharded like the parameter; any other state is a number. An
    optimizer that quantises states allocates them itself.
    """
    new_state = getattr(optimizer, "new_state", None)
    keys: dict[str, list[str]] = {}
    for full in saved:
        name, _, key = full.rpartition(".")
        keys.setdefault(name, []).append(key)
    for name, parameter in parameters_of(model).items():
        of_parameter = keys.get(f"{OPTIMIZER}.{name}", ())
        if new_state is not None:
            optimizer.state[parameter] = new_state(parameter) if of_parameter else {}
            continue
        for key in of_parameter:
            tensor = saved[f"{OPTIMIZER}.{name}.{key}"]
            dtype = getattr(torch, tensor.dtype)
            like = tensor.shape == tuple(as_dtensor_like(parameter, parameter).shape)
            optimizer.state[parameter][key] = (
                torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
                if like
                # Fused optimizers count steps on the device of the parameter.
                else torch.zeros(tensor.shape, dtype=dtype, device=parameter.device)
            )
