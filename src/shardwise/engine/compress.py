"""Compress the gradients that DDP averages, with torch's own communication hooks.

`bf16` and `fp16` round each bucket and average it in 16 bits. PowerSGD averages matrices as
products of two low-rank factors; what a step leaves out is added to the gradients of the next one.
That error and the factors are the state of a rank, which checkpoints keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardwise.pytorch.dispatch import DispatchMode
from shardwise.pytorch.private import COLLECTIVES
from shardwise.spec.compression import MIN_COMPRESSION
from shardwise.spec.strategy import Strategy

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

_HOOKS: dict[str, Hook] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powerSGD_hook,
}
# Added to the norm of each column, so that a gradient of zeros does not become NaN: experts without
# tokens have one.
_EPSILON = 1e-8
_STATE = "_shardwise_powersgd"
# How checkpoints name a tensor of PowerSGD: this, what it is, and the number of its bucket.
_PREFIX = "powersgd."


def compress_gradients(
    model: DistributedDataParallel, strategy: Strategy, mesh: DeviceMesh
) -> None:
    """Register the hook of `strategy.compress` on a DDP model.

    The model has its final buckets, to which the state of PowerSGD belongs, and has not run yet.
    """
    group = mesh.get_group()
    if strategy.compress is None or group.size() == 1:
        return
    state: Any = group
    if strategy.compress == "powersgd":
        state = PowerSGDState(
            group,
            matrix_approximation_rank=strategy.powersgd_rank,
            start_powerSGD_iter=strategy.powersgd_start,
            min_compression_rate=MIN_COMPRESSION,
            orthogonalization_epsilon=_EPSILON,
        )
        object.__setattr__(model, _STATE, state)
    hook = _HOOKS[strategy.compress]
    model.register_comm_hook(state, _waiting(hook) if mesh.device_type == "cpu" else hook)


def compression_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of PowerSGD on this rank, by name; empty without it and before it begins."""
    state = getattr(model, _STATE, None)
    if state is None:
        return {}
    return {
        f"{_PREFIX}{what}.{bucket}": tensor
        for what, tensors in _tensors(state).items()
        for bucket, tensor in tensors.items()
    }


def restore_compression(model: nn.Module, step: int, saved: Mapping[str, torch.Tensor]) -> None:
    """Continue PowerSGD after `step` steps with what `compression_state` returned then.

    If `saved` has none of its tensors, because the number of ranks has changed, the errors start at
    zero and the factors at random.
    """
    state = getattr(model, _STATE, None)
    if state is None:
        return
    state.iter = step
    device = next(model.parameters()).device
    for what, tensors in _tensors(state).items():
        prefix = f"{_PREFIX}{what}."
        tensors.update(
            {
                int(name.removeprefix(prefix)): tensor.to(device)
                for name, tensor in saved.items()
                if name.startswith(prefix)
            }
        )


def is_compression_state(name: str) -> bool:
    """Whether a tensor with this name comes from `compression_state`."""
    return name.startswith(_PREFIX)


def _tensors(state: PowerSGDState) -> dict[str, dict[int, torch.Tensor]]:
    """The tensors of PowerSGD by bucket: what was left out, and the two factors of each matrix."""
    return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}


def _waiting(hook: Hook) -> Hook:
    """The hook for Gloo: it waits for each of its collectives.

    PowerSGD continues after a collective. Gloo would run that on its own threads, where the order
    of collectives could differ from rank to rank.
    """

    # DDP checks the annotations of a hook.
    @wraps(hook, assigned=())
    def waiting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        with _WaitForCollectives():
            return hook(state, bucket)

    return waiting


class _WaitForCollectives(DispatchMode):  # type: ignore[no-untyped-call]
    """Waits for each collective that is dispatched while entered."""

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Wait if the operation is a collective; `out` then ends with its work."""
        if func in COLLECTIVES:
            dist.Work.unbox(out[-1]).wait()
