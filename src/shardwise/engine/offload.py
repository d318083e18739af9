"""Saved activations of blocks in host memory between forward and backward.

Autograd's hooks for saved tensors copy what a block saves to the host, pinned where the device is
an accelerator, and back when the block's backward begins. A block that recomputes saves its input
only. Copies run in order with the compute: nothing is overlapped, and memory is free at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.pytorch.device import is_accelerator
from shardwise.pytorch.private import storage_id, version_of
from shardwise.spec.strategy import Strategy


def offload_activations(blocks: Sequence[nn.Module], strategy: Strategy) -> None:
    """Offload what each block saves, if the strategy says so; parameter names do not change.

    Called after recompute is applied, so that tensors saved for recomputation are offloaded too.
    """
    if strategy.offloads("activations"):
        for block in blocks:
            _offload_forward(block)


def _offload_forward(block: nn.Module) -> None:
    """Replace a block's forward by one whose saved tensors are copied to the host."""
    forward = block.forward

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # What other blocks share stays on the device: parameters, masks and positions.
        given = [t for t in _tensors((args, kwargs)) if not t.requires_grad]
        saved = _SavedOfBlock([*block.parameters(), *block.buffers(), *given])
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return forward(*args, **kwargs)

    block.forward = offloaded


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


class _View(NamedTuple):
    """A saved tensor: the copy that holds its bytes, and how to read them."""

    copy: _Copy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedOfBlock:
    """What one forward of a block saves; tensors that share a storage share one copy."""

    def __init__(self, kept: Iterable[torch.Tensor]) -> None:
        # A frozen parameter may have a tensor type of its own, which `pack` leaves alone too.
        plain = (t for t in kept if type(t) in (torch.Tensor, nn.Parameter))
        self._kept = {t.untyped_storage().data_ptr() for t in plain}
        self._copies: list[weakref.ref[_Copy]] = []
        # The last copy of a storage, by its identity, which another storage may have later.
        self._last: dict[int, weakref.ref[_Copy]] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """Copy a tensor that autograd saves to the host; parameters and the like stay."""
        if type(tensor) is not torch.Tensor or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._kept:
            return tensor
        key = storage_id(storage)
        reference = self._last.get(key)
        copy = None if reference is None else reference()
        if copy is None or not copy.is_of(tensor):
            copy = _Copy(tensor)
            self._last[key] = weakref.ref(copy)
            self._copies.append(self._last[key])
        copy.readers += 1
        return _View(
            copy, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        """The saved tensor on its device; the first call brings back all that the block saved."""
        if not isinstance(saved, _View):
            return saved
        for reference in self._copies:
            copy = reference()
            if copy is not None:
                copy.bring_back()
        self._copies.clear()
        flat = saved.copy.read()
        return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


class _Copy:
    """The bytes of a storage: in host memory, then on the device until the last reader has them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage, self._version = weakref.ref(storage), version_of(tensor)
        self._device = tensor.device
        bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        pinned = is_accelerator(tensor.device)
        self._host: torch.Tensor | None = torch.empty(
            bytes_.shape, dtype=torch.uint8, pin_memory=pinned
        )
        self._host.copy_(bytes_, non_blocking=pinned)
        _on_host[id(self._host)] = self._host
        self._back: torch.Tensor | None = None
        self.readers = 0

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this holds the bytes of a tensor: of the same storage, not changed since."""
        same = self._storage() is tensor.untyped_storage()
        return same and self._version == version_of(tensor)

    def bring_back(self) -> None:
        """Copy the bytes to the device, unless they are there, and free the host's."""
        if self._host is not None:
            pinned = is_accelerator(self._device)
            self._back = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._back.copy_(self._host, non_blocking=pinned)
            self._host = None

    def read(self) -> torch.Tensor:
        """The bytes on the device; the last reader takes them."""
        self.bring_back()
        back = self._back
        if back is None:
            raise RuntimeError("offloaded activations are read once; retain_graph needs no offload")
        self.readers -= 1
        if self.readers <= 0:
            self._back = None
        return back


# Copies in host memory, of all blocks, by identity.
_on_host: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def activation_bytes_on_host() -> int:
    """Bytes of activations that are in host memory now."""
    return sum(copy.nbytes for copy in list(_on_host.values()))
