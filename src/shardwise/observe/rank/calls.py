"""Collectives of one rank, call by call: what each was, when it ran, what it moved and what it hid.

Everything later is made of these: sums by operation and by unit, ranks joined, verdicts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Codes, Ints, Trace
from shardwise.observe.rank.classify import RUNTIME_CATEGORIES, on_device
from shardwise.observe.rank.gloo import gloo_calls, message, width_of
from shardwise.timeline.intervals import Intervals, minus, union
from shardwise.timeline.spans import Timeline

# Names of collectives as metadata, kernels and Gloo write them.
_OPERATIONS = {
    "all-gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce-scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all-reduce": re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE),
    "all-to-all": re.compile(r"all_?to_?all", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast", re.IGNORECASE),
    "send and receive": re.compile(r"send_?recv|\bsend\b|\brecv\b", re.IGNORECASE),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """A value per call, in the order they began; numbers that are not known are -1."""

    operation: list[str]
    start_ns: Ints
    end_ns: Ints
    # When and on which thread the host asked for it.
    asked_ns: Ints
    asked_thread: Codes
    # Bytes of the whole group's message, and how many ranks the group has.
    moved_bytes: Ints
    group_size: Ints
    # Calls of two ranks with the same key, in the same place among those, are one collective.
    key: list[str]

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def lasted_ns(self) -> Ints:
        return self.end_ns - self.start_ns


class CollectiveTime(NamedTuple):
    """All calls of one operation; bytes and group are None where the trace does not tell them."""

    operation: str
    calls: int
    total_ns: int
    exposed_ns: int
    moved_bytes: int | None
    group_size: int | None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth over the whole time of the calls: waiting for others counts."""
        if self.moved_bytes is None or self.group_size is None:
            return None
        return bus_bandwidth(self.operation, self.moved_bytes, self.group_size, self.total_ns)


def bus_bandwidth(operation: str, moved: int, group_size: int, time_ns: int) -> float | None:
    """Bytes per second that every link must carry, comparable with what a link can.

    An all-reduce moves everything twice.
    """
    if group_size < 2 or time_ns <= 0:
        return None
    passes = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}.get(operation)
    if passes is None:
        return None
    return passes * (group_size - 1) / group_size * moved / (time_ns / 1e9)


def operation_of(text: str) -> str:
    """What a collective is called here, by what a kernel, metadata or operation calls it."""
    matching = (op for op, pattern in _OPERATIONS.items() if pattern.search(text))
    return next(matching, "unnamed collective")


def calls_of(trace: Trace, timeline: Timeline) -> Calls:
    """Every collective of a trace."""
    return _on_device(trace, timeline) if on_device(trace).any() else _on_cpu(trace)


def _on_device(trace: Trace, timeline: Timeline) -> Calls:
    """Kernels that communicate; what they are by metadata where there is some, else by name."""
    moving = np.flatnonzero(timeline.of_kind("communication"))
    moving = moving[np.argsort(timeline.start_ns[moving], kind="stable")]
    rows = np.flatnonzero(on_device(trace))[moving]
    told = {row: place for place, row in enumerate(trace.collective_row.tolist())}
    count = len(rows)
    moved, sizes = (np.full(count, -1, dtype=np.int64) for _ in range(2))
    operations, keys = [], []
    streams: dict[int, int] = {}
    names: dict[str, str] = {}
    lanes = timeline.lane[moving].tolist()
    for index, (row, lane) in enumerate(zip(rows.tolist(), lanes, strict=True)):
        place = told.get(row)
        text = trace.texts[trace.name[row]]
        # A process group has a stream of its own; streams are numbered as they are first used.
        key = f"stream {streams.setdefault(lane, len(streams))}"
        if place is not None:
            text = trace.texts[trace.collective[place]]
            width = width_of(_text(trace, trace.dtype[place]))
            elements = int(trace.elements[place])
            moved[index] = elements * width if width > 0 and elements >= 0 else -1
            sizes[index] = trace.group_size[place]
            members = _text(trace, trace.group_ranks[place])
            if members:
                key = f"{_text(trace, trace.group[place])} {members}"
        if text not in names:
            names[text] = operation_of(text)
        operations.append(names[text])
        keys.append(key)
    asked, thread = _launches(trace, rows)
    return Calls(
        operation=operations,
        start_ns=trace.start_ns[rows],
        end_ns=trace.end_ns[rows],
        asked_ns=asked,
        asked_thread=thread,
        moved_bytes=moved,
        group_size=sizes,
        key=keys,
    )


def _text(trace: Trace, code: int) -> str:
    return trace.texts[code] if code >= 0 else ""


def _launches(trace: Trace, rows: Ints) -> tuple[Ints, Codes]:
    """When and where the host launched each device row: the runtime call of its correlation."""
    launch = launch_rows(trace, rows)
    known = launch >= 0
    asked = np.where(known, trace.start_ns[launch], -1)
    thread = np.where(known, trace.thread[launch], -1).astype(np.int32)
    return asked, thread


def launch_rows(trace: Trace, rows: Ints) -> Ints:
    """Rows of the runtime calls that launched these device rows; -1 where there is none."""
    runtime = trace.in_category(*RUNTIME_CATEGORIES) & (trace.correlation >= 0)
    calls = np.flatnonzero(runtime)
    if not len(calls):
        return np.full(len(rows), -1, dtype=np.int64)
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    numbers, wanted = trace.correlation[calls], trace.correlation[rows]
    place = np.minimum(np.searchsorted(numbers, wanted), len(calls) - 1)
    return np.where((numbers[place] == wanted) & (wanted >= 0), calls[place], -1)


def _on_cpu(trace: Trace) -> Calls:
    """Whole events of Gloo's threads, not the pieces inside them."""
    found = gloo_calls(trace)
    asked = found.asked
    told = found.carried if asked is None else asked
    operations = [operation_of(trace.texts[code]) for code in trace.name[told].tolist()]
    moved, sizes = (np.full(len(told), -1, dtype=np.int64) for _ in range(2))
    for index, row in enumerate(found.carried.tolist()):
        request = None if asked is None else int(asked[index])
        moved[index], sizes[index] = message(trace, row, request, operations[index])
    unknown = np.full(len(told), -1, dtype=np.int64)
    return Calls(
        operation=operations,
        start_ns=trace.start_ns[found.carried],
        end_ns=trace.end_ns[found.carried],
        asked_ns=unknown if asked is None else trace.start_ns[asked],
        asked_thread=(unknown if asked is None else trace.thread[asked]).astype(np.int32),
        moved_bytes=moved,
        group_size=sizes,
        key=_cpu_keys(trace, operations, moved, sizes),
    )


def _cpu_keys(trace: Trace, operations: list[str], moved: Ints, sizes: Ints) -> list[str]:
    """By operation and size: Gloo's threads take turns, and no trace names the group.

    Groups smaller than the world are those of hybrid sharding, whose members follow each other.
    """
    world, rank = trace.world_size or 0, trace.rank or 0
    keys = []
    for operation, size, group in zip(operations, moved.tolist(), sizes.tolist(), strict=True):
        block = f" of group {rank // group}" if 0 < group < world else ""
        keys.append(f"{operation} {size}{block}")
    return keys


def by_operation(calls: Calls, compute: Intervals) -> list[CollectiveTime]:
    """Calls summed by operation, the most exposed first."""
    found = []
    operations = np.asarray(calls.operation)
    for name in sorted(set(calls.operation)):
        mine = np.flatnonzero(operations == name)
        moved, sizes = calls.moved_bytes[mine], calls.group_size[mine]
        found.append(
            CollectiveTime(
                operation=name,
                calls=len(mine),
                total_ns=int(calls.lasted_ns[mine].sum()),
                exposed_ns=minus(union(calls.start_ns[mine], calls.end_ns[mine]), compute),
                moved_bytes=int(moved.sum()) if (moved >= 0).all() else None,
                # Groups of several sizes have no bandwidth in common.
                group_size=int(sizes[0]) if (sizes == sizes[0]).all() and sizes[0] > 0 else None,
            )
        )
    return sorted(found, key=lambda one: -one.exposed_ns)
