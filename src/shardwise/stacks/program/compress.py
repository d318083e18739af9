"""Gradients that DDP compresses before it averages them, by torch's communication hooks."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.stacks.program.settings import COMPRESS, POWERSGD_RANK, POWERSGD_START


def powersgd_state() -> PowerSGDState:
    """The state of PowerSGD: it adds what a step leaves out to the next one."""
    return PowerSGDState(
        None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_START,
        # A gradient of zeros would otherwise become NaN.
        orthogonalization_epsilon=1e-8,
    )


def compress_gradients(model: DistributedDataParallel) -> None:
    """Register the hook; it changes the arithmetic."""
    if COMPRESS == "powersgd":
        model.register_comm_hook(powersgd_state(), powerSGD_hook)
    elif COMPRESS == "bf16":
        model.register_comm_hook(None, bf16_compress_hook)
    else:
        model.register_comm_hook(None, fp16_compress_hook)


def communication_hook() -> Any:
    """The hook, for a loop that registers it itself."""
    if COMPRESS == "powersgd":
        return powerSGD_hook
    return bf16_compress_hook if COMPRESS == "bf16" else fp16_compress_hook
