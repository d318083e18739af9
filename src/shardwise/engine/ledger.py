"""Bytes of the tensors alive during a run, followed operation by operation."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The sum of tensors alive, and its highest value since `reset`.

    FSDP frees and refills the storages of gathered parameters in place, so every tensor is known
    from the start and the size of every storage is read anew after each operation: exact and
    slow, a tool for a few steps. A storage that first shows up in a view was made out of sight,
    inside a collective, and is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._foreign: dict[int, weakref.ref[Any]] = {}
        with warnings.catch_warnings():
            # Looking at every object wakes deprecated ones.
            warnings.simplefilter("ignore")
            existing = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        self._follow(existing, self._alive)

    def reset(self) -> None:
        """Forget the peak; start again from what is alive now."""
        self.peak_bytes = self.current_bytes()

    def current_bytes(self) -> int:
        storages = [reference() for reference in list(self._alive.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Follow what one operation reads and makes."""
        out = func(*args, **(kwargs or {}))
        book = self._foreign if func.is_view else self._alive
        self._follow(tree_leaves((args, kwargs, out)), book)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes())
        return out

    def _follow(self, leaves: Iterable[Any], book: dict[int, weakref.ref[Any]]) -> None:
        for leaf in leaves:
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive and key not in self._foreign:
                book[key] = weakref.ref(storage, lambda _, k=key: book.pop(k, None))  # type: ignore[misc]
