"""The active parameters of a mixture of experts: those that the forward of one token uses."""

from __future__ import annotations

from shardwise.units.unit import ModelUnits, Parameter

# Part of the name of stacked experts: of `mlp.experts.down_proj`, not of a shared expert.
_STACKED = ".experts."


def is_stacked(parameter: Parameter) -> bool:
    """Whether a parameter holds one slice per expert along its first dimension."""
    return _STACKED in parameter.name


def active_parameters(units: ModelUnits, experts_per_token: int) -> int:
    """Number of parameters of the model without the experts that a token is not routed to.

    Embedding and head count in full, as in most model cards.
    """
    idle = 0
    for unit in units.units:
        for parameter in filter(is_stacked, unit.parameters):
            experts = parameter.shape[0]
            idle += parameter.numel // experts * (experts - experts_per_token)
    return units.parameters - idle
