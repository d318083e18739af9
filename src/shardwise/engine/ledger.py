"""Bytes of live tensors during a run, measured after every operation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_C10D, _FSDP = torch.ops.c10d, torch.ops.fsdp
# Tensors that neither a known owner nor a collective identifies: activations, logits, gradients
# before their reduction.
REST = "working"
# Most points of a curve. A longer one keeps only the highest of every few points.
MOST_POINTS = 1024


class LiveBytes(TorchDispatchMode):
    """Bytes of live tensors: the peak since `reset` and its parts.

    FSDP frees and refills the storages of gathered parameters in place. Therefore all existing
    tensors are tracked from the start, and the size of every storage is read after each operation:
    exact but slow, for a few steps only. A storage that first appears in a view was allocated
    inside a collective and is not counted.

    `known` names tensors that exist from the start. Buffers of gathers and reductions are
    identified by their collectives; all other tensors are "working".

    With `draws`, which costs a little more, `curve` holds (operation number, bytes by term)
    wherever the sum has changed since `reset`. Beyond MOST_POINTS it keeps the highest of every
    `curve_every` changes.
    """

    def __init__(
        self, known: Mapping[str, Iterable[torch.Tensor]] | None = None, *, draws: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.peak_terms: dict[str, int] = {}
        self.curve: list[tuple[int, dict[str, int]]] = []
        self.curve_every = 1
        self._draws = draws
        self._operations = self._changes = 0
        self._total = -1
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._uncounted: dict[int, weakref.ref[Any]] = {}
        self._term_of: dict[int, str] = {}
        # By type(): isinstance reads __class__, which makes deprecated proxies warn.
        existing = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        self._track(existing, self._alive)
        for term, tensors in (known or {}).items():
            self._name(tensors, term)

    def reset(self) -> None:
        """Clear the peak and the curve; begin with the tensors that are alive now."""
        self.peak_bytes, self._total = 0, -1
        self._operations = self._changes = 0
        self.curve, self.curve_every = [], 1
        self._measure()

    def finish(self) -> None:
        """Append the current bytes as the last point of the curve."""
        self.curve.append((self._operations, self.current()))

    def current(self) -> dict[str, int]:
        """Bytes alive now, by term."""
        terms: dict[str, int] = {}
        for key, reference in list(self._alive.items()):
            storage = reference()
            if storage is not None:
                term = self._term_of.get(key, REST)
                terms[term] = terms.get(term, 0) + storage.nbytes()
        return terms

    def _measure(self) -> None:
        terms = None
        if self._draws:
            terms = self.current()
            total = sum(terms.values())
            if total != self._total:
                self._total = total
                self._add_point(terms)
        else:
            storages = [reference() for reference in list(self._alive.values())]
            total = sum(storage.nbytes() for storage in storages if storage is not None)
        if total > self.peak_bytes:
            self.peak_bytes = total
            # Threads of a collective may free tensors between two readings: use the same reading.
            self.peak_terms = self.current() if terms is None else terms

    def _add_point(self, terms: dict[str, int]) -> None:
        point = (self._operations, terms)
        # The first point is kept: bytes left at the end are compared with it.
        if len(self.curve) > 1 and self._changes % self.curve_every:
            self.curve[-1] = max(self.curve[-1], point, key=_sum)
        else:
            self.curve.append(point)
        self._changes += 1
        if len(self.curve) == MOST_POINTS:
            first, *rest = self.curve
            pairs = zip(rest[::2], [*rest[1::2], rest[-1]], strict=False)
            self.curve = [first, *(max(pair, key=_sum) for pair in pairs)]
            self.curve_every *= 2

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation, then track its inputs and outputs."""
        out = func(*args, **(kwargs or {}))
        storages_by_key = self._uncounted if func.is_view else self._alive
        before = len(self._alive)
        self._track(tree_leaves((args, kwargs, out)), storages_by_key)
        collective = func.namespace in ("c10d", "fsdp")
        if collective:
            self._identify(func, args, kwargs or {})
        self._operations += 1
        # Only a new tensor, or a storage that FSDP refills, can raise the sum.
        if collective or len(self._alive) > before:
            self._measure()
        return out

    def _identify(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is _C10D._allgather_base_.default:
            self._name([args[0]], "unsharded_parameters")
        elif func is _C10D._reduce_scatter_base_.default:
            self._name([args[0]], "gradients")
            self._name([args[1]], "reduce_buffers")
        elif func is _C10D.allreduce_.default:
            self._name(args[0], "gradients")
        elif func is _FSDP.split_with_sizes_copy.default:
            self._name(kwargs["out"], "unsharded_parameters")
        elif func is _FSDP.chunk_cat.default:
            self._name([kwargs["out"]], "reduce_buffers")

    def _name(self, tensors: Iterable[Any], term: str) -> None:
        for tensor in tensors:
            plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(plain, torch.Tensor) and not plain.is_meta:
                self._term_of[plain.untyped_storage()._cdata] = term

    def _track(self, leaves: Iterable[Any], storages_by_key: dict[int, weakref.ref[Any]]) -> None:
        for leaf in leaves:
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            # A compiler keeps fake tensors, which have no data.
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
                continue
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive and key not in self._uncounted:
                storages_by_key[key] = weakref.ref(
                    storage, partial(self._forget, key, storages_by_key)
                )

    def _forget(self, key: int, storages_by_key: dict[int, weakref.ref[Any]], _: Any) -> None:
        storages_by_key.pop(key, None)
        self._term_of.pop(key, None)


def _sum(point: tuple[int, dict[str, int]]) -> int:
    return sum(point[1].values())
