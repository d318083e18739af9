"""Bytes of the tensors alive during a run, followed operation by operation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_C10D, _FSDP = torch.ops.c10d, torch.ops.fsdp
# What no operation of the engine or owner of the tensor tells: activations, logits, gradients that
# are not reduced yet.
REST = "working"
# Of a curve; where a step has more, of every few only the highest is kept.
MOST_POINTS = 1024


class LiveBytes(TorchDispatchMode):
    """The sum of tensors alive, its highest value since `reset`, and what that was made of.

    FSDP frees and refills the storages of gathered parameters in place, so every tensor is known
    from the start and the size of every storage is read anew after each operation: exact and
    slow, a tool for a few steps. A storage that first shows up in a view was made out of sight,
    inside a collective, and is not counted.

    `known` names tensors that exist from the start; what the engine gathers into and reduces
    from is recognised by its operations, the rest is "working".

    With `draws`, which costs a little more, `curve` holds the operation's number and the
    bytes by term wherever the sum has changed since `reset`; beyond MOST_POINTS it keeps the
    highest of every `curve_every` changes.
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
        self._foreign: dict[int, weakref.ref[Any]] = {}
        self._term: dict[int, str] = {}
        # By type(): isinstance reads __class__, which makes deprecated proxies warn.
        existing = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        self._follow(existing, self._alive)
        for term, tensors in (known or {}).items():
            self._name(tensors, term)

    def reset(self) -> None:
        """Forget the peak and the curve; start again from what is alive now."""
        self.peak_bytes, self._total = 0, -1
        self._operations = self._changes = 0
        self.curve, self.curve_every = [], 1
        self._measure()

    def finish(self) -> None:
        """End the curve with what is alive now."""
        self.curve.append((self._operations, self.current()))

    def current(self) -> dict[str, int]:
        """Bytes alive now, by term."""
        terms: dict[str, int] = {}
        for key, reference in list(self._alive.items()):
            storage = reference()
            if storage is not None:
                term = self._term.get(key, REST)
                terms[term] = terms.get(term, 0) + storage.nbytes()
        return terms

    def _measure(self) -> None:
        terms = None
        if self._draws:
            terms = self.current()
            total = sum(terms.values())
            if total != self._total:
                self._total = total
                self._draw(terms)
        else:
            storages = [reference() for reference in list(self._alive.values())]
            total = sum(storage.nbytes() for storage in storages if storage is not None)
        if total > self.peak_bytes:
            self.peak_bytes = total
            # Threads of a collective may free in between: the curve and the peak are one reading.
            self.peak_terms = self.current() if terms is None else terms

    def _draw(self, terms: dict[str, int]) -> None:
        point = (self._operations, terms)
        # The beginning stands alone: what is left at the end is compared with it.
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
        """Follow what one operation reads and makes."""
        out = func(*args, **(kwargs or {}))
        book = self._foreign if func.is_view else self._alive
        known = len(self._alive)
        self._follow(tree_leaves((args, kwargs, out)), book)
        engine = func.namespace in ("c10d", "fsdp")
        if engine:
            self._recognise(func, args, kwargs or {})
        self._operations += 1
        # Only a new tensor, or the engine refilling one, can make a peak.
        if engine or len(self._alive) > known:
            self._measure()
        return out

    def _recognise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
                self._term[plain.untyped_storage()._cdata] = term

    def _follow(self, leaves: Iterable[Any], book: dict[int, weakref.ref[Any]]) -> None:
        for leaf in leaves:
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            # A compiler keeps tensors without data.
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
                continue
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive and key not in self._foreign:
                book[key] = weakref.ref(storage, lambda _, k=key: self._forget(k, book))  # type: ignore[misc]

    def _forget(self, key: int, book: dict[int, weakref.ref[Any]]) -> None:
        book.pop(key, None)
        self._term.pop(key, None)


def _sum(point: tuple[int, dict[str, int]]) -> int:
    return sum(point[1].values())
