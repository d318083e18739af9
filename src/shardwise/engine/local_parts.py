"""Keep parameters of tensor parallelism as plain local tensors, because DDP accepts no DTensors.

During its forward, also when recomputed, each module sees its parameters as DTensors. Outside of
it, the parameters are the local parts of this process, which store how they are sharded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwise.engine.mesh import TENSOR

_MARK = "shardwise_part"


class LocalPart(NamedTuple):
    """How a local tensor is a part of a full one: mesh, placements, full shape and stride."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def divided(self, local: torch.Tensor) -> DTensor:
        """The DTensor whose local part is `local`."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def keep_local_parts(model: nn.Module) -> None:
    """Replace every DTensor parameter of `model` by its local part on this process."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parts = {}
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    made[id(parameter)] = _local(parameter)
                module.register_parameter(key, made[id(parameter)])
                parts[key] = local_part_of(made[id(parameter)])
        if parts:
            _use_dtensors_in_forward(module, parts)


def local_part_of(parameter: torch.Tensor) -> LocalPart | None:
    """How a local parameter is a part of a full one; None if it is full or a DTensor."""
    part: LocalPart | None = getattr(parameter, _MARK, None)
    return part


def is_tensor_parallel(parameter: torch.Tensor) -> bool:
    """Whether a parameter takes part in tensor parallelism, sharded or replicated.

    True for DTensors with a tensor axis, and for local parts.
    """
    if isinstance(parameter, DTensor):
        return TENSOR in (parameter.device_mesh.mesh_dim_names or ())
    return local_part_of(parameter) is not None


def as_dtensor_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, such as its gradient, as a DTensor like the parameter.

    It is returned unchanged if the parameter is no local part, or the shapes differ.
    """
    part = local_part_of(parameter)
    same = part is not None and tensor.shape == parameter.shape
    return part.divided(tensor) if part is not None and same else tensor


def _local(parameter: DTensor) -> nn.Parameter:
    """The local part of a DTensor parameter, marked with how it is sharded."""
    local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    part = LocalPart(
        parameter.device_mesh, parameter.placements, parameter.shape, tuple(parameter.stride())
    )
    setattr(local, _MARK, part)
    return local


def _use_dtensors_in_forward(module: nn.Module, parts: dict[str, Any]) -> None:
    """Let a module see its local parts as DTensors during its forward.

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
