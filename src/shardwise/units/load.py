"""Units of whatever model a run names. The only door from planning to torch, opened on demand."""

from __future__ import annotations

from shardwise.spec.lookup import Model, ModuleRef
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import ModelUnits


def load_units(model: Model, seq_len: int, strategy: Strategy) -> ModelUnits:
    """Formulas where a ModelSpec describes the model, its traced module otherwise."""
    if isinstance(model, ModuleRef):
        from shardwise.units.module import factory_units

        return factory_units(model.factory, seq_len, strategy.param_dtype)
    return decoder_units(model, seq_len, strategy.param_dtype, strategy.compile)
