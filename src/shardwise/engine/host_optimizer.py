"""An optimizer that updates master weights in host memory: the device keeps weights and gradients.

The device's weights have the dtype of compute. A step copies gradients to the host, updates there,
and copies the weights back, rounded to the dtype of the device's; nothing is overlapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.engine.low_bit import is_cancelled
from shardwise.pytorch.device import is_accelerator, wait_for_stream
from shardwise.pytorch.private import local_tensor

Groups = list[dict[str, Any]]


class HostOptimizer(torch.optim.Optimizer):
    """Element-wise optimizers on copies of parameters, or of their shards, in host memory.

    The state of a parameter also has its master weights, so that a checkpoint holds them.
    """

    # A nonzero value cancels the update.
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        groups: Groups,
        make: Callable[[Groups], torch.optim.Optimizer],
        dtype: torch.dtype,
        states: tuple[str, ...],
    ) -> None:
        """Copy the parameters of `groups` to the host in `dtype`; `make` updates the copies.

        `states` names the states that the made optimizer keeps in the shape of a parameter.
        """
        super().__init__(groups, {"lr": groups[0].get("lr", 0.0)})
        host_groups, self._pairs = [], []
        for group in groups:
            masters = [self._on_host(p, dtype, states) for p in group["params"]]
            host_groups.append({**group, "params": masters})
            self._pairs += list(zip(group["params"], masters, strict=True))
        self._updates = make(host_groups)
        for parameter, master in self._pairs:
            local = {n: local_tensor(t) for n, t in self.state[parameter].items() if n != "master"}
            self._updates.state[master] = local
        for group, updated in zip(self.param_groups, self._updates.param_groups, strict=True):
            group["lr"] = updated["lr"]

    def _on_host(
        self, parameter: torch.Tensor, dtype: torch.dtype, states: tuple[str, ...]
    ) -> torch.Tensor:
        """This rank's master weights of a parameter, with room for their gradients.

        Allocates the parameter's states, which are sharded like the parameter.
        """
        pinned = is_accelerator(parameter.device)
        whole = parameter.detach()
        like: dict[str, Any] = {
            "dtype": dtype,
            "device": "cpu",
            "memory_format": torch.preserve_format,
        }
        master = torch.empty_like(whole, pin_memory=pinned, **like)
        local: torch.Tensor = local_tensor(master)
        local.copy_(local_tensor(whole))
        local.grad = torch.empty_like(local, pin_memory=pinned)
        kept = {name: torch.zeros_like(whole, **like) for name in states}
        if "exp_avg" in states:
            kept["step"] = torch.zeros((), dtype=torch.float32)
        self.state[parameter] = {**kept, "master": master}
        return local

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter, to load saved values into."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless `found_inf` cancels it; waits for the device."""
        if is_cancelled(self.found_inf):
            return None
        for group, updated in zip(self.param_groups, self._updates.param_groups, strict=True):
            updated["lr"] = group["lr"]
        gradients = {}
        for parameter, master in self._pairs:
            gradients[master] = master.grad
            if parameter.grad is None:
                master.grad = None
            else:
                assert master.grad is not None
                master.grad.copy_(local_tensor(parameter.grad), non_blocking=True)
        wait_for_stream(self._pairs[0][0].device)
        self._updates.step(closure)
        for parameter, master in self._pairs:
            local_tensor(parameter).copy_(master, non_blocking=True)
            master.grad = gradients[master]
        return None
