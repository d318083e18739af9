"""Shard a model in a training loop of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from shardwise.engine.mesh import join, local_device
from shardwise.engine.parallelize import parallelize as _parallelize
from shardwise.engine.sync import micro_batch
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

    model:    any nn.Module with a list of equal blocks; build a large one under
              torch.device("meta"), and it is initialised here unit by unit
    strategy: "ddp", "zero1", "zero2", "zero3", "hsdp", "zero3:8", or a Strategy; its
              fields, such as recompute="full", are keywords too
    mesh:     a DeviceMesh to use instead of one made from the strategy

    Joins the process group if none is initialised. Make the optimizer from the parameters
    of the returned model. To accumulate gradients, run each micro-batch inside
    `shardwise.micro_batch(model, last=...)`. Raises SpecError if the model cannot be
    sharded this way.
    """
    join(local_device() if mesh is None else local_device(mesh.device_type))
    changes = {name: value for name, value in settings.items() if value is not None}
    if isinstance(strategy, str):
        strategy = Strategy.read({**parse_strategy(strategy), **changes}, where="strategy")
    elif changes:
        strategy = strategy.but(**changes)
    return _parallelize(model, strategy, mesh)
