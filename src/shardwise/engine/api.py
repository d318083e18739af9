"""Shard a model in a training loop of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from shardwise.engine.mesh import join
from shardwise.engine.parallelize import parallelize as _parallelize
from shardwise.engine.sync import micro_batch
from shardwise.pytorch.device import local_device
from shardwise.spec.settings import StrategySettings, keywords
from shardwise.spec.strategy import Strategy, parse_strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["micro_batch", "parallelize"]


@keywords(StrategySettings)
def parallelize(
    model: nn.Module,
    strategy: str | Strategy = "zero3",
    mesh: DeviceMesh | None = None,
    **settings: Unpack[StrategySettings],
) -> nn.Module:
    """Shard or replicate a model over the processes that torchrun has started.

    Joins the process group if none is initialised. Create the optimizer from the
    parameters of the returned model. To accumulate gradients, run each micro-batch inside
    `shardwise.micro_batch(model, last=...)`.

    Args:
        model: Any nn.Module with a list of equal blocks, on its device. Build a large
            model under torch.device("meta"): it is then initialised here, unit by unit.
        strategy: "ddp", "zero1", "zero2", "zero3", "hsdp", "zero3:8", or a Strategy. Its
            fields, such as recompute="full", are keywords too.
        mesh: The DeviceMesh to use; None creates one from the strategy.
        **settings: Fields of Strategy.

    Raises:
        SpecError: The model cannot be sharded this way; the message says why.
    """
    join(local_device() if mesh is None else local_device(mesh.device_type))
    changes = {name: value for name, value in settings.items() if value is not None}
    if isinstance(strategy, str):
        strategy = Strategy.read({**parse_strategy(strategy), **changes}, where="strategy")
    elif changes:
        strategy = strategy.but(**changes)
    return _parallelize(model, strategy, mesh)
