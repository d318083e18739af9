"""What a step leaves behind, as tensors under names that no world size or strategy changes.

Nothing but tensors is saved: learning rates and the order of the data follow from the step, and
settings from the run.toml. So nothing has to be unpickled to go on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.format.pieces import Tensor

# What wrappers add to the names of what they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
MODEL, OPTIMIZER, OWN = "model", "optimizer", "rank"


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the name each has in the bare model; tied ones once."""
    return {plain_name(name): p for name, p in _bare(model).named_parameters()}


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What only an update changes: parameters, and the optimizer's state of each."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters_of(model).items():
        found[f"{MODEL}.{name}"] = parameter.detach()
        # In an order that does not depend on who made the state: who writes what follows from it.
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                found[f"{OPTIMIZER}.{name}.{key}"] = value
    return found


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those a model means to keep; a forward may change them."""
    bare = _bare(model)
    kept = set(bare.state_dict().keys())
    return {
        f"{MODEL}.{plain_name(name)}": buffer
        for name, buffer in bare.named_buffers()
        if name in kept
    }


def own_state(
    rank: int, device: torch.device, more: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What each rank has of its own: its random numbers, and `more`."""
    found = {**more, "random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    return {f"{OWN}.{rank}.{name}": tensor for name, tensor in found.items()}


def restore_random(own: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(own["random.cpu"])
    if device.type == "cuda" and "random.cuda" in own:
        torch.cuda.set_rng_state(own["random.cuda"], device)


def own_room(saved: Mapping[str, Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Tensors to load what this rank once had of its own into."""
    prefix = f"{OWN}.{rank}."
    return {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in saved.items()
        if name.startswith(prefix)
    }


def make_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]
) -> None:
    """Room for the state that was saved, where the optimizer has not made its own yet.

    A tensor of the parameter's shape is laid out like it; anything else is a number.
    """
    keys: dict[str, list[str]] = {}
    for full in saved:
        name, _, key = full.rpartition(".")
        keys.setdefault(name, []).append(key)
    for name, parameter in parameters_of(model).items():
        for key in keys.get(f"{OPTIMIZER}.{name}", ()):
            tensor = saved[f"{OPTIMIZER}.{name}.{key}"]
            dtype = getattr(torch, tensor.dtype)
            like = tensor.shape == tuple(parameter.shape)
            optimizer.state[parameter][key] = (
                torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
                if like
                # Fused optimizers count where the parameters are.
                else torch.zeros(tensor.shape, dtype=dtype, device=parameter.device)
            )
