"""Collectives of a CPU run: Gloo's events, each beside the operation that asked for it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shardwise.observe.file.trace import Ints, Trace

_BACKENDS = ("gloo:", "mpi:", "ucc:")
# Types as the profiler writes them, of C++ or of metadata, without c10:: and in lower case.
BYTES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "bfloat16": 2,
    "half": 2,
    "short int": 2,
    "bool": 1,
    "byte": 1,
    "signed char": 1,
    "unsigned char": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


# As what Gloo carries an operation out, and which of its inputs it hands over.
_CARRIED_AS = {
    "c10d::_allgather_base_": ("gloo:all_gather", 1),
    "c10d::_reduce_scatter_base_": ("gloo:all_reduce", 1),
    "c10d::allreduce_": ("gloo:all_reduce", 0),
}


class GlooCalls(NamedTuple):
    """Rows of the backend's threads, and for each the torch.distributed operation it carries out.

    `asked` is None where their numbers differ.
    """

    carried: Ints
    asked: Ints | None


def gloo_calls(trace: Trace) -> GlooCalls:
    """Gloo carries out a reduce-scatter as an all-reduce: only `asked` tells what it was.

    A trace links the two by nothing but size and order, and order alone deceives: a call that is
    not waited for may be carried out by its thread after one that was asked for later.
    """
    carried, asked = _named(trace, _BACKENDS), _named(trace, ("c10d::",))
    if len(asked) != len(carried):
        return GlooCalls(carried, None)
    waiting: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    for place, row in enumerate(carried.tolist()):
        waiting[trace.texts[trace.name[row]], _elements(trace, row)].append(place)
    asked_at: dict[int, int] = {}
    unlike = []
    for row in asked.tolist():
        name, argument = _CARRIED_AS.get(trace.texts[trace.name[row]], ("", 0))
        alike = waiting[name, _elements(trace, row, argument)]
        if alike:
            asked_at[alike.popleft()] = row
        else:
            unlike.append(row)
    left = [place for place in range(len(carried)) if place not in asked_at]
    asked_at.update(zip(left, unlike, strict=True))
    ordered = [asked_at[place] for place in range(len(carried))]
    return GlooCalls(carried, np.asarray(ordered, dtype=np.int64))


def _named(trace: Trace, starts: tuple[str, ...]) -> Ints:
    """Rows whose name begins like this, in the order in which they began."""
    matches = np.asarray([text.startswith(starts) for text in trace.texts], dtype=np.bool_)
    rows = np.flatnonzero(matches[trace.name])
    return rows[np.argsort(trace.start_ns[rows], kind="stable")]


class Message(NamedTuple):
    """Bytes of the whole group's message and the size of the group; -1 where it is not told."""

    size: int
    group_size: int


def message(trace: Trace, carried: int, asked: int | None, operation: str) -> Message:
    """What a call moved, by the shapes the profiler recorded."""
    world = trace.world_size or -1
    mine = _elements(trace, carried)
    width = _width(trace, carried)
    if mine < 0 or width < 0:
        return Message(-1, world)
    if operation == "all-gather":
        whole, part = (_elements(trace, asked, 0), mine) if asked is not None else (-1, -1)
        group = whole // part if whole > 0 and part > 0 else world
        return Message(mine * group * width if group > 0 else -1, group)
    if operation == "reduce-scatter" and asked is not None:
        part = _elements(trace, asked, 0)
        return Message(mine * width, mine // part if part > 0 else world)
    # The group of an all-reduce cannot be seen in its shapes.
    return Message(mine * width, -1)


def _elements(trace: Trace, row: int, argument: int = 0) -> int:
    try:
        dims = msgspec.json.decode(trace.shapes[row])[argument]
        while dims and isinstance(dims[0], list):  # a list of tensors: the first is all there is
            dims = dims[0]
        return math.prod(int(size) for size in dims)
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return -1


def _width(trace: Trace, row: int) -> int:
    try:
        return width_of(msgspec.json.decode(trace.types[row])[0])
    except (KeyError, IndexError, TypeError, msgspec.DecodeError):
        return -1


def width_of(dtype: Any) -> int:
    """Bytes of one element; -1 for a type nobody knows."""
    return BYTES.get(str(dtype).removeprefix("c10::").lower(), -1)
