"""From the meta device to real tensors, unit by unit, and proof that nothing stays unset.

A unit is made whole, filled and then sharded before the next one is made, so a process never
holds more than its own shards and one unit. Every rank fills a module with the same numbers, drawn
from a seed of that module alone: a model starts the same on any number of processes, however it is
cut into units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.spec.record import SpecError

# Fills the parameters and buffers of one module itself, not of its children.
Fill = Callable[[str, nn.Module], None]


def is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


class Materializer:
    """Makes the tensors of a model that was built on the meta device."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        fill: Fill | None = None,
        seed: int = 0,
    ) -> None:
        self.device, self.dtype, self.seed = device, dtype, seed
        self.fill = fill or own_initializer(model)
        self._names = {id(module): name for name, module in model.named_modules()}
        # Tied parameters are one tensor before and after.
        self._made: dict[int, torch.Tensor] = {}

    def unit(self, members: Iterable[nn.Module]) -> None:
        """Make and fill all that is still on the meta device in `members`."""
        modules = [module for member in members for module in member.modules()]
        made = {id(module) for module in modules if self._make(module)}
        if not made:
            return
        fresh = [module for module in modules if made & {id(module), *map(id, module.children())}]
        # A parent may refine what its children did, so it comes after them.
        for module in reversed(fresh):
            name = self._names[id(module)]
            with _seeded(self.seed, name, self.device), torch.no_grad():
                self.fill(name, module)
        self._check(fresh)

    def _make(self, module: nn.Module) -> bool:
        made = False
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                key = id(parameter)
                if key not in self._made:
                    dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
                    real = _unset(parameter, self.device, dtype)
                    self._made[key] = nn.Parameter(real, requires_grad=parameter.requires_grad)
                    # Ids must stay taken while the table is in use.
                    self._made[-key] = parameter
                module._parameters[name] = self._made[key]  # type: ignore[assignment]
                made = True
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _unset(buffer, self.device, buffer.dtype)
                made = True
        return made

    def _check(self, modules: Iterable[nn.Module]) -> None:
        unset = [
            f"{self._names[id(module)]}.{name}".lstrip(".")
            for module in modules
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and not tensor.is_meta and _has_unset(tensor)
        ]
        if unset:
            more = f" and {len(unset) - 1} more" if len(unset) > 1 else ""
            raise SpecError(
                f"model: {unset[0]}{more} stayed uninitialised; give its module a "
                "reset_parameters() that sets it, or build the model with real tensors "
                "(train.meta_init = false)"
            )


def own_initializer(model: nn.Module) -> Fill:
    """What the model itself says: `_init_weights` of transformers, or `reset_parameters`."""
    if hasattr(model, "_init_weights") and hasattr(model, "config"):
        return lambda name, module: model._init_weights(module)  # type: ignore[operator]
    return lambda name, module: _reset(module)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def module_seed(seed: int, name: str) -> int:
    """A seed for one module: a function of the run's seed and the module's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(module_seed(seed, name))
        yield


def _unset(like: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A tensor full of a value that no initialisation leaves behind."""
    tensor = torch.empty(like.shape, dtype=dtype, device=device)
    if dtype == torch.bool:
        return tensor.zero_()
    return tensor.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min)


def _has_unset(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool:
        # No value is left over to mark it with, so it cannot be shown to be set.
        return True
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())
