"""Activation checkpointing of blocks: all of them, a share, or selective by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.pytorch.private import leave_profiler_out_of_selective_checkpoints
from shardwise.spec.recompute import blocks_of_share
from shardwise.spec.strategy import Strategy

aten = torch.ops.aten
_MATMULS = (aten.mm.default, aten.addmm.default)


def apply_recompute(blocks: Sequence[nn.Module], strategy: Strategy) -> None:
    """Checkpoint the blocks as the strategy's `recompute` says; parameter names do not change."""
    if strategy.recompute == "none":
        return
    if strategy.recompute == "selective":
        leave_profiler_out_of_selective_checkpoints()
        for block in blocks:
            _recompute_forward(block, _selective)
        return
    for block in blocks[: int(blocks_of_share(strategy.full_recompute_share, len(blocks)))]:
        _recompute_forward(block, None)


def _recompute_forward(block: nn.Module, context: Callable[[], Any] | None) -> None:
    """Replace a block's forward by a checkpointed one; `context` is its `context_fn`."""
    forward = block.forward
    settings: dict[str, Any] = {"use_reentrant": False}
    if context is not None:
        settings["context_fn"] = context

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **settings, **kwargs)

    block.forward = recomputed


def _selective() -> Any:
    """Checkpoint contexts that save attention and the first of every two matmuls of a block."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = "_scaled_dot_product" in op.__name__
        if op in _MATMULS:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
