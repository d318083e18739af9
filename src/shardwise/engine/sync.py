"""When gradients are reduced over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.spec.strategy import Strategy


@contextmanager
def micro_batch(model: nn.Module, strategy: Strategy, *, last: bool) -> Iterator[None]:
    """Wrap the forward *and* the backward of one micro-batch.

    DDP decides in the forward whether a backward will reduce, so wrapping the backward alone
    saves nothing. `strategy` must be resolved.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or strategy.grad_sync != "last")
        model.set_requires_all_reduce(last or strategy.grad_sync == "every")
        model.set_reshard_after_backward(last or bool(strategy.reshard_after_backward))
    skip = isinstance(model, DistributedDataParallel) and not last and strategy.grad_sync != "every"
    with model.no_sync() if skip else nullcontext():  # type: ignore[operator]
        yield
