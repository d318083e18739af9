"""Collectives of a CPU run: Gloo's events, each with the operation that issued it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shardwise.observe.file.trace import Ints, Trace

_BACKENDS = ("gloo:", "mpi:", "ucc:")
# Bytes per element by C++ type name, in lower case and without c10::.
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


# The Gloo event that executes an operation, and which of its inputs is sent.
_EXECUTED_AS = {
    "c10d::_allgather_base_": ("gloo:all_gather", 1),
    "c10d::_reduce_scatter_base_": ("gloo:all_reduce", 1),
    "c10d::allreduce_": ("gloo:all_reduce", 0),
    "c10d::allgather_into_tensor_coalesced_": ("gloo:all_gather", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("gloo:all_reduce", 1),
    "c10d::alltoall_base_": ("gloo:all_to_all", 1),
}


class GlooCalls(NamedTuple):
    """Rows of the backend's threads, and for each the torch.distributed operation that issued it.

    `issued` is None where their counts differ.
    """

    executed: Ints
    issued: Ints | None


def gloo_calls(trace: Trace) -> GlooCalls:
    """Match Gloo's events with the torch.distributed operations that issued them.

    Gloo executes a reduce-scatter as an all-reduce: only the issuing operation has the right name.
    A trace links the two by size and order alone, and order is not enough: an asynchronous call may
    be executed after a call that was issued later.
    """
    executed, issued = _rows_named(trace, _BACKENDS), _rows_named(trace, ("c10d::",))
    if len(issued) != len(executed):
        return GlooCalls(executed, None)
    unmatched: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    for index, row in enumerate(executed.tolist()):
        unmatched[trace.texts[trace.name[row]], _elements(trace, row)].append(index)
    issued_by: dict[int, int] = {}
    without_match = []
    for row in issued.tolist():
        name, argument = _EXECUTED_AS.get(trace.texts[trace.name[row]], ("", 0))
        candidates = unmatched[name, _elements(trace, row, argument)]
        if candidates:
            issued_by[candidates.popleft()] = row
        else:
            without_match.append(row)
    # Calls that no size matches are matched by order.
    left = [index for index in range(len(executed)) if index not in issued_by]
    issued_by.update(zip(left, without_match, strict=True))
    ordered = [issued_by[index] for index in range(len(executed))]
    return GlooCalls(executed, np.asarray(ordered, dtype=np.int64))


def _rows_named(trace: Trace, starts: tuple[str, ...]) -> Ints:
    """Rows whose name starts with one of `starts`, ordered by start."""
    matches = np.asarray([text.startswith(starts) for text in trace.texts], dtype=np.bool_)
    rows = np.flatnonzero(matches[trace.name])
    return rows[np.argsort(trace.start_ns[rows], kind="stable")]


class Message(NamedTuple):
    """Bytes of the full message of a group (not of one shard), and its ranks; -1 if unknown."""

    size: int
    group_size: int


def message(trace: Trace, executed: int, issued: int | None, operation: str) -> Message:
    """Bytes of a call's full message and the ranks of its group; -1 for what is unknown.

    Both follow from the shapes that the profiler recorded. The full message is the gathered tensor
    of an all-gather, the input of a reduce-scatter. Shapes do not show the group of an all-reduce.

    `executed` is the row of Gloo's event, `issued` the row of the issuing operation (None if it is
    not known).
    """
    world = trace.world_size or -1
    sent = _elements(trace, executed)
    width = _width(trace, executed)
    if sent < 0 or width < 0:
        return Message(-1, world)
    if operation == "all-gather":
        gathered = _elements(trace, issued, 0) if issued is not None else -1
        group = gathered // sent if gathered > 0 and sent > 0 else world
        return Message(sent * group * width if group > 0 else -1, group)
    if operation == "reduce-scatter" and issued is not None:
        shard = _elements(trace, issued, 0)
        return Message(sent * width, sent // shard if shard > 0 else world)
    if operation == "all-to-all" and issued is not None:
        # One piece for each rank, along the first dimension.
        return Message(sent * width, next(iter(shape(trace, issued)), -1))
    # The shapes of an all-reduce do not show its group.
    return Message(sent * width, -1)


def exchanged(trace: Trace, issued: int) -> tuple[int, int]:
    """Elements that the operation of an all-to-all sends and receives; -1 for any other one."""
    if trace.texts[trace.name[issued]] != "c10d::alltoall_base_":
        return -1, -1
    return _elements(trace, issued, 1), _elements(trace, issued, 0)


def shape(trace: Trace, row: int) -> list[int]:
    """Shape of the first input of an operation; empty where it is not recorded."""
    try:
        return [int(size) for size in msgspec.json.decode(trace.shapes[row])[0]]
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return []


def _elements(trace: Trace, row: int, argument: int = 0) -> int:
    """Number of elements of one input of an operation; -1 where its shape is not recorded."""
    try:
        dims = msgspec.json.decode(trace.shapes[row])[argument]
        while dims and isinstance(dims[0], list):  # a list of tensors has one member
            dims = dims[0]
        return math.prod(int(size) for size in dims)
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return -1


def _width(trace: Trace, row: int) -> int:
    """Bytes per element of the first input of an operation; -1 where unknown."""
    try:
        return width_of(msgspec.json.decode(trace.types[row])[0])
    except (KeyError, IndexError, TypeError, msgspec.DecodeError):
        return -1


def width_of(dtype: Any) -> int:
    """Bytes per element; -1 for an unknown type."""
    return BYTES.get(str(dtype).removeprefix("c10::").lower(), -1)
