"""Parameters that are divided by tensor parallelism, as plain tensors: DDP takes no DTensors.

Each module sees its parameters as DTensors while it runs, also when it is recomputed. Outside, the
parameters are the parts of this process, and know what they are parts of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwise.engine.mesh import TENSOR

_MARK = "shardwise_part"


class Part(NamedTuple):
    """Of which tensor a local one is a part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def divided(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def keep_local_parts(model: nn.Module) -> None:
    """Replace every divided parameter of `model` by the part of this process."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parts = {}
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    made[id(parameter)] = _local(parameter)
                module.register_parameter(key, made[id(parameter)])
                parts[key] = part_of(made[id(parameter)])
        if parts:
            _show_divided(module, parts)


def part_of(parameter: torch.Tensor) -> Part | None:
    """What a parameter is a part of; None if it is whole, or knows it as a DTensor."""
    part: Part | None = getattr(parameter, _MARK, None)
    return part


def is_divided(parameter: torch.Tensor) -> bool:
    """Whether a parameter knows the tensor axis: it is divided there, or replicated by torch."""
    if isinstance(parameter, DTensor):
        return TENSOR in (parameter.device_mesh.mesh_dim_names or ())
    return part_of(parameter) is not None


def divided_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, such as its gradient, as the DTensor it is a part of."""
    part = part_of(parameter)
    same = part is not None and tensor.shape == parameter.shape
    return part.divided(tensor) if part is not None and same else tensor


def _local(parameter: DTensor) -> nn.Parameter:
    local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    part = Part(
        parameter.device_mesh, parameter.placements, parameter.shape, tuple(parameter.stride())
    )
    setattr(local, _MARK, part)
    return local


def _show_divided(module: nn.Module, parts: dict[str, Any]) -> None:
    """Let the module read DTensors during its forward.

    An entry in the `__dict__` of a module hides its parameter of the same name.
    """

    def show(*_: Any) -> None:
        for key, part in parts.items():
            module.__dict__[key] = part.divided(module.get_parameter(key))

    def hide(*_: Any) -> None:
        for key in parts:
            module.__dict__.pop(key, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(hide, always_call=True)
