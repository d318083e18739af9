"""Measure the bytes of live tensors during a run, after every operation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.pytorch.dispatch import DispatchMode, leaves
from shardwise.pytorch.private import (
    ALL_GATHER,
    REDUCE_SCATTER,
    FakeTensor,
    plain_tensors,
    storage_id,
)

_C10D, _FSDP = torch.ops.c10d, torch.ops.fsdp
# The term of tensors that neither a known owner nor a collective identifies: activations, logits,
# gradients before their reduction.
OTHER_TERM = "working"
# The term of gathered parameters: FSDP frees and refills their storages in place.
UNSHARDED_TERM = "unsharded_parameters"
# Maximum number of points of a curve. If reached, the higher of every two points is kept.
MOST_POINTS = 1024


class LiveBytes(DispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of live tensors on this rank: the peak since `reset`, and its bytes by term.

    All existing tensors are tracked from the start. Bytes are added when a storage is first seen
    and subtracted when it is freed. FSDP frees and refills the storages of gathered parameters in
    place, which no operation shows: those are read again after each operation, which is slow and
    for a few steps only. A storage that first appears in a view was allocated inside a collective
    and is not counted.

    `known` gives the tensors that exist from the start, by term. Buffers of gathers and reductions
    are identified by their collectives; all other tensors are "working".

    With `draws`, which costs a little more, `curve` holds (operation number, bytes by term)
    wherever the sum has changed since `reset`. Beyond MOST_POINTS it keeps the highest of every
    `curve_every` changes.
    """

    # Tensors created inside DTensor operations are tracked too.
    composed_of_plain = frozenset({DTensor})

    def __init__(
        self, known: Mapping[str, Iterable[torch.Tensor]] | None = None, *, draws: bool = False
    ) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.peak_terms: dict[str, int] = {}
        self.curve: list[tuple[int, dict[str, int]]] = []
        self.curve_every = 1
        self._draws = draws
        self._operations = self._changes = 0
        self._total = -1
        self._alive: dict[int, weakref.ref[Any]] = {}
        # Bytes of live storages, except those that are freed and refilled in place.
        self._sizes: dict[int, int] = {}
        self._refilled: dict[int, weakref.ref[Any]] = {}
        self._uncounted: dict[int, weakref.ref[Any]] = {}
        self._term_of: dict[int, str] = {}
        # By type(): isinstance reads __class__, which makes deprecated proxies warn.
        existing = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        self._track(existing, self._alive)
        for term, tensors in (known or {}).items():
            self.assign(tensors, term)

    def reset(self) -> None:
        """Clear the peak and the curve; start again with the tensors that are alive now."""
        self.peak_bytes, self._total = 0, -1
        self._operations = self._changes = 0
        self.curve, self.curve_every = [], 1
        self._measure()

    def finish(self) -> None:
        """Append the bytes alive now as the last point of the curve."""
        self.curve.append((self._operations, self.current()))

    def current(self) -> dict[str, int]:
        """Bytes of live tensors now, by term."""
        terms: dict[str, int] = {}
        for key, reference in list(self._alive.items()):
            size = self._sizes.get(key)
            if size is None:
                storage = reference()
                size = 0 if storage is None else storage.nbytes()
            term = self._term_of.get(key, OTHER_TERM)
            terms[term] = terms.get(term, 0) + size
        return terms

    def _sum_now(self) -> int:
        """Bytes alive now."""
        # Copied at once: threads of a collective free tensors at any time.
        refilled = [reference() for reference in list(self._refilled.values())]
        read: int = sum(storage.nbytes() for storage in refilled if storage is not None)
        return sum(list(self._sizes.values())) + read

    def _measure(self) -> None:
        """Update the peak and the curve from the bytes alive now."""
        total = self._sum_now()
        if total <= self.peak_bytes and (not self._draws or total == self._total):
            return
        # Tensors may be freed between two readings, so peak and terms come from the same one.
        terms = self.current()
        total = sum(terms.values())
        if self._draws and total != self._total:
            self._total = total
            self._add_point(terms)
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_terms = total, terms

    def _add_point(self, terms: dict[str, int]) -> None:
        """Add (operation number, bytes by term) to the curve; halve the curve if it is full."""
        point = (self._operations, terms)
        # The first point is kept: bytes left at the end are compared with it.
        if len(self.curve) > 1 and self._changes % self.curve_every:
            self.curve[-1] = max(self.curve[-1], point, key=_total_bytes)
        else:
            self.curve.append(point)
        self._changes += 1
        if len(self.curve) == MOST_POINTS:
            first, *rest = self.curve
            pairs = zip(rest[::2], [*rest[1::2], rest[-1]], strict=False)
            self.curve = [first, *(max(pair, key=_total_bytes) for pair in pairs)]
            self.curve_every *= 2

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Track the tensors of one operation, and measure if the sum can have grown."""
        storages_by_key = self._uncounted if func.is_view else self._alive
        before = len(self._alive)
        self._track(leaves((args, kwargs, out)), storages_by_key)
        collective = func.namespace in ("c10d", "fsdp")
        if collective:
            self._identify(func, args, kwargs)
        self._operations += 1
        # Only a new tensor, or a storage that FSDP refills, can raise the sum.
        if collective or len(self._alive) > before:
            self._measure()

    def _identify(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Assign the buffers of a collective to their terms."""
        if func is ALL_GATHER:
            self.assign([args[0]], UNSHARDED_TERM)
        elif func is REDUCE_SCATTER:
            self.assign([args[0]], "gradients")
            self.assign([args[1]], "reduce_buffers")
        elif func is _C10D.allreduce_.default:
            self.assign(args[0], "gradients")
        elif func is _FSDP.split_with_sizes_copy.default:
            self.assign(kwargs["out"], UNSHARDED_TERM)
        elif func is _FSDP.chunk_cat.default:
            self.assign([kwargs["out"]], "reduce_buffers")

    def assign(self, tensors: Iterable[Any], term: str) -> None:
        """Assign the storages of tensors to a term, until they are freed."""
        for plain in _plain_tensors(tensors):
            if not plain.is_meta:
                key = storage_id(plain.untyped_storage())
                self._term_of[key] = term
                if term == UNSHARDED_TERM and self._sizes.pop(key, None) is not None:
                    self._refilled[key] = self._alive[key]

    def _track(self, leaves: Iterable[Any], storages_by_key: dict[int, weakref.ref[Any]]) -> None:
        """Start to track storages that are new, in `storages_by_key`, and update known sizes."""
        for tensor in _plain_tensors(leaves):
            # A compiler keeps fake tensors, which have no data.
            if isinstance(tensor, FakeTensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage_id(storage)
            if key in self._sizes:
                self._sizes[key] = storage.nbytes()
            elif key not in self._alive and key not in self._uncounted:
                reference = weakref.ref(storage, partial(self._forget, key, storages_by_key))
                storages_by_key[key] = reference
                if storages_by_key is self._alive:
                    size = storage.nbytes()
                    # An empty storage is one that FSDP will refill.
                    if size:
                        self._sizes[key] = size
                    else:
                        self._refilled[key] = reference

    def _forget(self, key: int, storages_by_key: dict[int, weakref.ref[Any]], _: Any) -> None:
        """Stop to track a storage that was freed."""
        storages_by_key.pop(key, None)
        self._sizes.pop(key, None)
        self._refilled.pop(key, None)
        self._term_of.pop(key, None)


def _plain_tensors(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The plain tensors that hold data on this rank, for all tensors among `leaves`."""
    for leaf in leaves:
        # By type(), which is quick: nearly all tensors are plain.
        if type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter:
            yield leaf
        elif isinstance(leaf, torch.Tensor):
            yield from plain_tensors(leaf)


def _total_bytes(point: tuple[int, dict[str, int]]) -> int:
    """Bytes of a point of the curve."""
    return sum(point[1].values())
