"""Collectives of one rank, call by call: what each was, when it ran, what it moved and what it hid.

Everything later is made of these: sums by operation and by unit, ranks joined, verdicts.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.observe.classify import RUNTIME_CATEGORIES, on_device
from shardwise.observe.gloo import gloo_calls, message, width_of
from shardwise.observe.trace import Codes, Ints, Trace
from shardwise.timeline.intervals import Intervals, length_until, minus, union
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


class Exposed(NamedTuple):
    """Instants in which a collective runs and nothing computes, each of one call.

    Where several run together, the instant belongs to the one that began last.
    """

    call: Ints
    start_ns: Ints
    end_ns: Ints

    def per_call(self, count: int) -> Ints:
        lengths = (self.end_ns - self.start_ns).astype(np.float64)
        return np.bincount(self.call, weights=lengths, minlength=count).astype(np.int64)


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


def exposed_pieces(calls: Calls, compute: Intervals, span: tuple[int, int]) -> Exposed:
    """Where collectives run and nothing computes, inside `span`."""
    owner, start, end = _owned(calls)
    start, end = np.clip(start, *span), np.clip(end, *span)
    # Cut the pieces where compute begins or ends, and keep what lies outside it.
    edges = np.concatenate([compute.start, compute.end])
    edges.sort()
    first = np.searchsorted(edges, start, side="right")
    cuts = np.searchsorted(edges, end, side="left") - first
    cuts = np.where(end > start, cuts + 1, 0)
    index = np.repeat(np.arange(len(owner)), cuts)
    number = np.arange(len(index)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    place = first[index] + number
    last = number == cuts[index] - 1
    begin = np.where(number == 0, start[index], edges[place - 1] if len(edges) else 0)
    stop = np.where(last, end[index], edges[np.minimum(place, max(0, len(edges) - 1))]
                    if len(edges) else 0)  # fmt: skip
    # An even number of edges passed: between two intervals.
    kept = (place % 2 == 0) & (stop > begin)
    return Exposed(owner[index[kept]], begin[kept], stop[kept])


def _owned(calls: Calls) -> tuple[Ints, Ints, Ints]:
    """Instants in which some collective runs, each given to the one that began last."""
    owner: list[int] = []
    begin: list[int] = []
    stop: list[int] = []
    running: list[tuple[int, int]] = []  # the last to begin first
    starts, ends = calls.start_ns.tolist(), calls.end_ns.tolist()
    now = 0

    def advance(limit: int) -> None:
        nonlocal now
        while running and now < limit:
            index = -running[0][1]
            until = min(ends[index], limit)
            if until > now:
                owner.append(index)
                begin.append(now)
                stop.append(until)
                now = until
            if ends[index] <= now:
                heapq.heappop(running)
        now = max(now, limit)

    for index, start in enumerate(starts):
        if running:
            advance(start)
        now = start
        heapq.heappush(running, (-start, -index))
    if starts:
        advance(max(ends))
    return tuple(np.asarray(column, dtype=np.int64) for column in (owner, begin, stop))  # type: ignore[return-value]


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


def free_before(calls: Calls, compute: Intervals) -> Ints:
    """Compute that ran right before each call while no collective did: room it could have used."""
    if not len(calls):
        return np.empty(0, dtype=np.int64)
    reached = np.maximum.accumulate(calls.end_ns)
    # Not those that begin at the same moment: they did not stand in the way before.
    earlier = np.searchsorted(calls.start_ns, calls.start_ns, side="left") - 1
    before = np.where(earlier >= 0, reached[np.maximum(earlier, 0)], calls.start_ns)
    before = np.minimum(before, calls.start_ns)
    room: Ints = length_until(compute, calls.start_ns) - length_until(compute, before)
    return room
