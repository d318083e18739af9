"""Allocate and initialise a model from the meta device unit by unit; check that every value is set.

Each unit is allocated unsharded, initialised and sharded before the next one, so a process holds
at most its own shards and one unit. All ranks draw the same numbers for a module, from a seed that
depends on the run's seed and the module's name. So the initial weights do not depend on the number
of processes or on the units, nor on adapters: an adapted model has the same base weights as the
model without adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.engine.adapter import FrozenWeights, initialise_adapter
from shardwise.pytorch.adapted import adapted_layers, without_adapters
from shardwise.pytorch.device import is_accelerator
from shardwise.pytorch.parts import Parts
from shardwise.pytorch.private import parameter_reset
from shardwise.spec.record import SpecError

# Initialises the parameters and buffers of one module, given its name, not of its children.
Fill = Callable[[str, nn.Module], None]


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


class Materializer:
    """Allocates and initialises the tensors of a model that was built on the meta device."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        fill: Fill | None = None,
        seed: int = 0,
        frozen: FrozenWeights | None = None,
    ) -> None:
        """Prepare to allocate `model` on `device`; floating-point parameters get `dtype`.

        `fill` initialises a module; by default the model's own initialiser is used.
        """
        self.device, self.dtype, self.seed = device, dtype, seed
        self.fill = fill or own_initializer(model)
        self._frozen = frozen or FrozenWeights(Parts(model))
        self._names = {id(module): name for name, module in model.named_modules()}
        with without_adapters([model]):
            self._names |= {id(module): name for name, module in model.named_modules()}
        # Tied parameters stay one tensor.
        self._allocated: dict[int, torch.Tensor] = {}

    def unit(self, members: Sequence[nn.Module]) -> None:
        """Allocate and initialise the tensors of `members` that are still on the meta device.

        Then frozen weights are stored in the format of the model's adapter.
        """
        with without_adapters(members) as base:
            self._fill(base)
        for layer in adapted_layers(members):
            allocated = [self._allocate(part) for part in layer.modules()]
            if any(allocated):
                with _seeded(self.seed, self._names[id(layer)], self.device), torch.no_grad():
                    initialise_adapter(layer)
                self._check(layer.modules())
        self._frozen.store(members)

    def _fill(self, members: Iterable[nn.Module]) -> None:
        """Allocate and initialise the modules without their adapters."""
        modules = [module for member in members for module in member.modules()]
        allocated = {id(module) for module in modules if self._allocate(module)}
        if not allocated:
            return
        fresh = [
            module for module in modules if allocated & {id(module), *map(id, module.children())}
        ]
        # A parent may change values that its children set, so children are initialised first.
        for module in reversed(fresh):
            name = self._names[id(module)]
            with _seeded(self.seed, name, self.device), torch.no_grad():
                self.fill(name, module)
        self._check(fresh)

    def _allocate(self, module: nn.Module) -> bool:
        """Allocate a module's own meta tensors; return whether there were any."""
        changed = False
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                key = id(parameter)
                if key not in self._allocated:
                    dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
                    real = _filled_with_sentinel(parameter, self.device, dtype)
                    self._allocated[key] = nn.Parameter(real, requires_grad=parameter.requires_grad)
                    # Keep the meta tensor alive: its id is a key of the table.
                    self._allocated[-key] = parameter
                setattr(module, name, self._allocated[key])
                changed = True
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                setattr(module, name, _filled_with_sentinel(buffer, self.device, buffer.dtype))
                changed = True
        return changed

    def _check(self, modules: Iterable[nn.Module]) -> None:
        """Raise SpecError if a value of these modules was not initialised."""
        unset = [
            f"{self._names[id(module)]}.{name}".lstrip(".")
            for module in modules
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(recurse=False, remove_duplicate=False)
            if not tensor.is_meta and _has_unset(tensor)
        ]
        if unset:
            more = f" and {len(unset) - 1} more" if len(unset) > 1 else ""
            raise SpecError(
                f"model: {unset[0]}{more} stayed uninitialised; give its module a "
                "reset_parameters() that sets it, or build the model with real tensors "
                "(train.meta_init = false)"
            )


def own_initializer(model: nn.Module) -> Fill:
    """The model's own initialiser: `_init_weights` of transformers, else `reset_parameters`."""
    if hasattr(model, "_init_weights") and hasattr(model, "config"):
        return lambda name, module: model._init_weights(module)  # type: ignore[operator]
    return lambda name, module: _reset(module)


def _reset(module: nn.Module) -> None:
    """Call the method that resets the parameters of a module, if it has one."""
    reset = parameter_reset(module)
    if callable(reset):
        reset()


def named_seed(seed: int, name: str) -> int:
    """A seed from a hash of the run's seed and a name, such as a module's."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """A context in which random numbers come from the named seed."""
    devices = [device] if is_accelerator(device) else []
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        torch.manual_seed(named_seed(seed, name))
        yield


def _filled_with_sentinel(
    like: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor filled with a value that no initialiser writes: NaN or the smallest integer."""
    tensor = torch.empty(like.shape, dtype=dtype, device=device)
    if dtype == torch.bool:
        return tensor.zero_()
    return tensor.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min)


def _has_unset(tensor: torch.Tensor) -> bool:
    """Whether a tensor still has values of `_filled_with_sentinel`; always True for booleans."""
    if tensor.dtype == torch.bool:
        # A boolean has no spare value to mark unset elements, so it counts as unset.
        return True
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())
