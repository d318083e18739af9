"""Modules of transformers that hold the matrices of all experts of a block in one tensor each."""

from __future__ import annotations

from torch import nn

# What transformers sets on a class whose experts it can compute in grouped products.
_DESCRIBED = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")


def stacked_matrices(module: nn.Module) -> list[str]:
    """Names of a module's own stacked matrices; empty unless its experts run as grouped products.

    Each has three dimensions: experts, then those of a matrix.
    """
    if not all(hasattr(module, name) for name in _DESCRIBED):
        return []
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    own = dict(module.named_parameters(recurse=False))
    return [name for name in names if name in own and own[name].ndim == 3]
