"""Units of whatever model a run names. The only door from planning to torch, opened on demand."""

from __future__ import annotations

from shardwise.spec.lookup import Model, ModuleRef
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import ModelUnits


def load_units(model: Model, seq_len: int, strategy: Strategy) -> ModelUnits:
    """Formulas where a ModelSpec describes the model, its traced module otherwise."""
    if isinstance(model, ModuleRef):
        try:
            from shardwise.units.module import factory_units
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise SpecError(
                f"model: reading {model.factory} needs torch; install it with "
                "'pip install shardwise[train]'"
            ) from None
        return factory_units(model.factory, seq_len, strategy.param_dtype)
    return decoder_units(model, seq_len, strategy.param_dtype, strategy.compile)
