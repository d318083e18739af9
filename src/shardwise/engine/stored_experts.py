"""Experts stored in NF4: dequantised for each grouped product, and again for its backward.

torchao's NF4 tensors have two dimensions, so the matrices of all experts are stored one below the
other. Autograd saves them as they are stored, as torchao's linear layer does: a dequantised copy
lives for one product only.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import grouped_mm

from shardwise.engine.routing import tokens_of_experts
from shardwise.units.unit import dequantised_parts

Shape = tuple[int, ...]


class StoredExperts:
    """The forward of a module of transformers whose stacked matrices are stored in NF4."""

    def __init__(self, module: nn.Module, shapes: dict[str, Shape]) -> None:
        """`shapes` are those of the stored matrices before they were stored, by name."""
        self._module, self._shapes = cast(Any, module), shapes

    def __call__(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs for each token, (tokens, width).

        Args:
            tokens: Hidden states, (tokens, width).
            chosen: The experts of each token, (tokens, experts per token).
            weights: Their weights, of the same shape.
        """
        module, each = self._module, chosen.shape[-1]
        experts, order = torch.sort(chosen.flatten())
        ends = tokens_of_experts(chosen, module.num_experts).cumsum(0, dtype=torch.int32)
        first = "gate_up_proj" if module.has_gate else "up_proj"
        made = self._product(tokens[order // each], first, experts, ends)
        made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
        made = self._product(made, "down_proj", experts, ends)
        if getattr(module, "has_post_expert_norm", False):
            made = module.post_expert_norm(made)
        made = made * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return made[back].view(len(tokens), each, -1).sum(1).to(tokens.dtype)

    def restore(self, dtype: torch.dtype) -> None:
        """Replace the stored matrices by dequantised ones, with transformers' own forward."""
        for name, shape in self._shapes.items():
            matrices = dequantised(getattr(self._module, name).data, shape, dtype)
            setattr(self._module, name, nn.Parameter(matrices, requires_grad=False))
        del self._module.forward

    def _product(
        self, rows: torch.Tensor, name: str, experts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Each row times the matrix of its expert, with its bias; rows are sorted by expert."""
        weight, device = getattr(self._module, name), rows.device.type
        if torch.is_autocast_enabled(device):
            rows = rows.to(torch.get_autocast_dtype(device))
        flipped = not self._module.is_transposed
        if name in self._shapes:
            stored = (weight, self._shapes[name], flipped, ends)
            made = _Product.apply(rows, *stored)  # type: ignore[no-untyped-call]
        else:
            weight = weight.to(rows.dtype)
            made = grouped_mm(rows, weight.transpose(1, 2) if flipped else weight, offs=ends)
        if self._module.has_bias:
            made = made + getattr(self._module, f"{name}_bias")[experts]
        return cast(torch.Tensor, made)


class _Product(torch.autograd.Function):
    """A grouped product with stored matrices, which need no gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, shape: Shape, flipped: bool, ends: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, ends)
        ctx.shape, ctx.flipped = shape, flipped
        matrices = dequantised(weight, shape, rows.dtype)
        return grouped_mm(rows, matrices.transpose(1, 2) if flipped else matrices, offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        weight, ends = ctx.saved_tensors
        matrices = dequantised(weight, ctx.shape, gradient.dtype)
        back = matrices if ctx.flipped else matrices.transpose(1, 2)
        return grouped_mm(gradient.contiguous(), back, offs=ends), None, None, None, None


def dequantised(weight: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A copy of stored matrices in `dtype` and in their own shape.

    Made part by part: torchao's temporaries take 14 bytes per element.
    """
    made = torch.empty(shape, dtype=dtype, device=weight.device)
    rows = len(weight) // dequantised_parts(shape)
    flat = made.view(-1, shape[-1])
    for part, to in zip(torch.split(weight, rows), torch.split(flat, rows), strict=True):
        to.copy_(part.to(dtype))
    return made
