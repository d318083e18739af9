"""The norm of the full gradient, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardwise.engine.local_parts import as_dtensor_like


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float = 0.0) -> torch.Tensor:
    """Clip gradients in place to the norm `clip_norm` (0: no clipping); return the norm before.

    The norm is the L2 norm of the full gradient, over all shards: the same on every rank.
    """
    trained = [p for p in parameters if p.grad is not None]
    gradients: dict[Any, list[torch.Tensor]] = {}
    for parameter in trained:
        assert parameter.grad is not None
        gradient = as_dtensor_like(parameter, parameter.grad)
        gradients.setdefault(_mesh_of(gradient), []).append(gradient)
    norms = [_full(get_total_norm(same)) for same in gradients.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if clip_norm:
        for mesh in {_mesh_of(p.grad) for p in trained}:
            clip_grads_with_norm_([p for p in trained if _mesh_of(p.grad) == mesh], clip_norm, norm)
    return norm


def _mesh_of(tensor: torch.Tensor | None) -> Any:
    """The device mesh of a DTensor; None for other tensors.

    Gradients are grouped by mesh, because one torch operation cannot mix meshes. Parameters that
    every process of a tensor group holds in full, such as norms, are not on the mesh of sharded
    layers.
    """
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _full(norm: torch.Tensor) -> torch.Tensor:
    """The norm over all shards, as a plain tensor."""
    whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole
