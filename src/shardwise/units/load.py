"""Units of whatever model a run names. The only door from planning to torch, opened on demand."""

from __future__ import annotations

from shardwise.progress import progress_line
from shardwise.spec.dtype import DType
from shardwise.spec.lookup import Model, ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import ModelUnits


def load_units(model: Model, seq_len: int, strategy: Strategy) -> ModelUnits:
    """Formulas where a ModelSpec describes the model, its traced module otherwise."""
    dtype, autocast = strategy.param_dtype, strategy.autocast
    if isinstance(model, ModelSpec):
        return decoder_units(model, seq_len, dtype, strategy.compile, autocast)
    source = model.factory if isinstance(model, ModuleRef) else model.name
    with progress_line(f"Tracing {source} on the meta device …"):
        return _traced(model, seq_len, dtype, autocast)


def _traced(model: Model, seq_len: int, dtype: DType, autocast: bool) -> ModelUnits:
    try:
        from shardwise.units.module import traced_units
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise SpecError(
            f"model: reading {model.name} needs torch; install it with "
            "'pip install shardwise[train]'"
        ) from None
    return traced_units(model, seq_len, dtype, autocast)
