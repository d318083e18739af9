"""Control in which micro-batches of a step gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.annotate import NO_SYNC, SYNC, annotated
from shardwise.spec.strategy import Strategy

_MARK, _SET, _AXES = "_shardwise_strategy", "_shardwise_sync", "_shardwise_axes"
_ENTERED = "_shardwise_entered"


def store_strategy(
    model: nn.Module, strategy: Strategy, axes: Mapping[str, str] | None = None
) -> nn.Module:
    """Store the resolved strategy and the axis of each process group, by name, on the model."""
    object.__setattr__(model, _MARK, strategy)
    object.__setattr__(model, _AXES, dict(axes or {}))
    return model


def strategy_of(model: nn.Module) -> Strategy:
    """The resolved strategy that `parallelize` applied.

    Raises:
        ValueError: The model does not come from `parallelize`.
    """
    strategy = getattr(model, _MARK, None)
    if strategy is None:
        raise ValueError("this model did not come from shardwise.parallelize")
    return cast(Strategy, strategy)


def parallel_axes(model: nn.Module) -> dict[str, str]:
    """The axis of each process group that `parallelize` used, by the name of the group."""
    return dict(getattr(model, _AXES, {}))


def is_parallel(model: nn.Module) -> bool:
    """Whether the model comes from `parallelize`."""
    return hasattr(model, _MARK)


@contextmanager
def micro_batch(model: nn.Module, *, last: bool = True) -> Iterator[None]:
    """A context for the forward and backward of one micro-batch; gradients are reduced when due.

    Needed to accumulate gradients, and for the loss with tensor parallelism. The forward must run
    inside: DDP decides there whether the backward will reduce.

    Args:
        model: The model that `parallelize` returned.
        last: True for the last micro-batch before the optimizer's step.
    """
    strategy = strategy_of(model)
    if isinstance(model, FSDPModule):
        wanted = (
            last or strategy.grad_sync != "last",
            last or strategy.grad_sync == "every",
            last or bool(strategy.reshard_after_backward),
        )
        # Each call visits all modules; most micro-batches need no change.
        if getattr(model, _SET, None) != wanted:
            model.set_requires_gradient_sync(wanted[0])
            model.set_requires_all_reduce(wanted[1])
            model.set_reshard_after_backward(wanted[2])
            object.__setattr__(model, _SET, wanted)
    skip = isinstance(model, DistributedDataParallel) and not last and strategy.grad_sync != "every"
    reduces = last or (not skip and strategy.grad_sync != "last")
    with (
        ExitStack() as entered,
        annotated(SYNC if reduces else NO_SYNC),
        model.no_sync() if skip else nullcontext(),  # type: ignore[operator]
        # For the loss of logits that are sharded by vocabulary, and for its backward.
        loss_parallel() if strategy.tensor > 1 else nullcontext(),
    ):
        object.__setattr__(model, _ENTERED, entered)
        yield


def contexts_of_micro_batch(model: nn.Module) -> ExitStack:
    """The stack of the current micro-batch; contexts entered in it end after the backward.

    Raises:
        ValueError: No micro-batch was started with `micro_batch`.
    """
    entered: ExitStack | None = getattr(model, _ENTERED, None)
    if entered is None:
        raise ValueError("run the forward and the backward inside shardwise.micro_batch")
    return entered
