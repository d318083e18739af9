"""For people with their own training loop: two lines into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.engine.mesh import join, local_device
from shardwise.engine.parallelize import parallelize as _parallelize
from shardwise.engine.sync import micro_batch
from shardwise.spec.strategy import Strategy, parse_strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["micro_batch", "parallelize"]


def parallelize(
    model: nn.Module,
    strategy: str | Strategy = "zero3",
    mesh: DeviceMesh | None = None,
    **settings: object,
) -> nn.Module:
    """A model that trains as `strategy` says, on the processes torchrun has started.

    `strategy` is a Strategy or its shorthand, such as "ddp", "zero2", "hsdp" or "zero3:8", with
    any of its fields as `settings`, such as `recompute="full"`. The process group is joined if
    that has not happened. A model built under `torch.device("meta")` is initialised here, unit by
    unit; build large ones that way.

    Make the optimizer from the parameters of what is returned. To accumulate gradients, wrap each
    micro-batch in `shardwise.micro_batch(model, last=...)`.
    """
    join(local_device() if mesh is None else local_device(mesh.device_type))
    if isinstance(strategy, str):
        strategy = Strategy.read({**parse_strategy(strategy), **settings}, where="strategy")
    elif settings:
        strategy = strategy.but(**settings)
    return _parallelize(model, strategy, mesh)
