"""Collectives of one rank, call by call: operation, start, end, bytes and process group.

Sums by operation and by unit, matching across ranks, and verdicts are all computed from these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Bools, Codes, Ints, Trace
from shardwise.observe.rank.axes import (
    AxisGroups,
    axes_on_cpu,
    axis_of_group,
    groups_along_axes,
    mesh_of,
    operation_along_axis,
)
from shardwise.observe.rank.classify import RUNTIME_CATEGORIES, on_device
from shardwise.observe.rank.gloo import exchanged, gloo_calls, message, width_of
from shardwise.step.spans import Timeline

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
    """The collectives of a rank, a value per call, ordered by start; unknown numbers are -1."""

    operation: list[str]
    start_ns: Ints
    end_ns: Ints
    # When and on which thread the host issued the call.
    issued_ns: Ints
    issued_thread: Codes
    # Bytes of the full message of the group (not of one shard), and number of ranks in the group.
    moved_bytes: Ints
    group_size: Ints
    # Elements that the rank sends and receives, where it may send another number than it receives.
    sent: Ints
    received: Ints
    # The n-th calls of two ranks with the same key are one collective.
    key: list[str]

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def duration_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    def inside(self, span: tuple[int, int]) -> tuple[Bools, Ints]:
        """Boolean per call: whether it runs inside `span`; and its nanoseconds inside `span`."""
        start, end = np.clip(self.start_ns, *span), np.clip(self.end_ns, *span)
        return (self.start_ns < span[1]) & (self.end_ns >= span[0]), end - start


class CollectiveTime(NamedTuple):
    """Calls of one operation in the profiled steps.

    Bytes and group size are None where they are not recorded for every call.
    """

    operation: str
    calls: int
    total_ns: int
    exposed_ns: int
    moved_bytes: int | None
    group_size: int | None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth over the full duration of the calls, waiting for other ranks included.

        None where bytes or group size are unknown.
        """
        if self.moved_bytes is None or self.group_size is None:
            return None
        return bus_bandwidth(self.operation, self.moved_bytes, self.group_size, self.total_ns)


def bus_bandwidth(operation: str, moved: int, group_size: int, time_ns: int) -> float | None:
    """Bus bandwidth in bytes per second, as nccl-tests define it: comparable with a link's peak.

    An all-reduce moves everything twice. None for groups of one rank, and for operations other than
    all-reduce, all-gather and reduce-scatter.
    """
    if group_size < 2 or time_ns <= 0:
        return None
    plain = operation.rpartition(" ")[2]
    passes = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}.get(plain)
    if passes is None:
        return None
    return passes * (group_size - 1) / group_size * moved / (time_ns / 1e9)


def operation_of(text: str) -> str:
    """Name of the collective that the name of a kernel, an operation or metadata refers to.

    "unnamed collective" if there is none.
    """
    matching = (op for op, pattern in _OPERATIONS.items() if pattern.search(text))
    return next(matching, "unnamed collective")


def calls_of(trace: Trace, timeline: Timeline) -> Calls:
    """All collectives of a trace: communication kernels, or the calls of Gloo in a CPU run."""
    return _on_device(trace, timeline) if on_device(trace).any() else _on_cpu(trace)


def _on_device(trace: Trace, timeline: Timeline) -> Calls:
    """Communication kernels, named by their metadata where present, else by the kernel name."""
    moving = np.flatnonzero(timeline.of_kind("communication"))
    moving = moving[np.argsort(timeline.start_ns[moving], kind="stable")]
    rows = np.flatnonzero(on_device(trace))[moving]
    metadata_of = {row: index for index, row in enumerate(trace.collective_row.tolist())}
    count = len(rows)
    moved, sizes, sent, received = (np.full(count, -1, dtype=np.int64) for _ in range(4))
    operations, keys = [], []
    streams: dict[int, int] = {}
    names: dict[str, str] = {}
    lanes = timeline.lane[moving].tolist()
    for index, (row, lane) in enumerate(zip(rows.tolist(), lanes, strict=True)):
        metadata, axis = metadata_of.get(row), ""
        text = trace.texts[trace.name[row]]
        # Each process group has its own stream; streams are numbered in order of first use.
        key = f"stream {streams.setdefault(lane, len(streams))}"
        if metadata is not None:
            text = trace.texts[trace.collective[metadata]]
            width = width_of(_text(trace, trace.dtype[metadata]))
            sent[index], received[index] = trace.sent[metadata], trace.received[metadata]
            elements = max(int(sent[index]), int(received[index]))
            moved[index] = elements * width if width > 0 and elements >= 0 else -1
            sizes[index] = trace.group_size[metadata]
            members = _text(trace, trace.group_ranks[metadata])
            group = _text(trace, trace.group[metadata])
            axis = axis_of_group(group)
            if members:
                key = f"{group} {members}"
        if text not in names:
            names[text] = operation_of(text)
        operations.append(operation_along_axis(names[text], axis))
        keys.append(key)
    issued, thread = _launches(trace, rows)
    return Calls(
        operation=operations,
        start_ns=trace.start_ns[rows],
        end_ns=trace.end_ns[rows],
        issued_ns=issued,
        issued_thread=thread,
        moved_bytes=moved,
        group_size=sizes,
        sent=sent,
        received=received,
        key=keys,
    )


def _text(trace: Trace, code: int) -> str:
    """The text of a code; empty for -1."""
    return trace.texts[code] if code >= 0 else ""


def _launches(trace: Trace, rows: Ints) -> tuple[Ints, Codes]:
    """When and on which thread the host launched each device row; -1 where not recorded.

    Rows and launches are matched by correlation id.
    """
    launch = launch_rows(trace, rows)
    known = launch >= 0
    issued = np.where(known, trace.start_ns[launch], -1)
    thread = np.where(known, trace.thread[launch], -1).astype(np.int32)
    return issued, thread


def launch_rows(trace: Trace, rows: Ints) -> Ints:
    """Row of the runtime call that launched each device row; -1 where not recorded."""
    runtime = trace.in_category(*RUNTIME_CATEGORIES) & (trace.correlation >= 0)
    calls = np.flatnonzero(runtime)
    if not len(calls):
        return np.full(len(rows), -1, dtype=np.int64)
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    numbers, wanted = trace.correlation[calls], trace.correlation[rows]
    place = np.minimum(np.searchsorted(numbers, wanted), len(calls) - 1)
    return np.where((numbers[place] == wanted) & (wanted >= 0), calls[place], -1)


def _on_cpu(trace: Trace) -> Calls:
    """Calls of a CPU run, from Gloo's events and the operations that issued them."""
    found = gloo_calls(trace)
    issued = found.issued
    described = found.executed if issued is None else issued
    operations = [operation_of(trace.texts[code]) for code in trace.name[described].tolist()]
    moved, sizes, sent, received = (np.full(len(described), -1, dtype=np.int64) for _ in range(4))
    for index, row in enumerate(found.executed.tolist()):
        request = None if issued is None else int(issued[index])
        moved[index], sizes[index] = message(trace, row, request, operations[index])
        if request is not None:
            sent[index], received[index] = exchanged(trace, request)
    axes = axes_on_cpu(trace, found.executed, issued)
    operations = [
        operation_along_axis(one, axis) for one, axis in zip(operations, axes, strict=True)
    ]
    unknown = np.full(len(described), -1, dtype=np.int64)
    return Calls(
        operation=operations,
        start_ns=trace.start_ns[found.executed],
        end_ns=trace.end_ns[found.executed],
        issued_ns=unknown if issued is None else trace.start_ns[issued],
        issued_thread=(unknown if issued is None else trace.thread[issued]).astype(np.int32),
        moved_bytes=moved,
        group_size=sizes,
        sent=sent,
        received=received,
        key=_cpu_keys(trace, operations, moved, sizes, axes),
    )


def _cpu_keys(
    trace: Trace, operations: list[str], moved: Ints, sizes: Ints, axes: list[str]
) -> list[str]:
    """The key of each call: operation, bytes and number of the group.

    A CPU trace does not name the process group: its number is computed from axis and rank.
    """
    world, rank = trace.world_size or 0, trace.rank or 0
    along = groups_along_axes(trace, axes, sizes)
    experts = mesh_of(trace).get("expert_shard", AxisGroups(1, 1))
    keys = []
    calls = zip(operations, moved.tolist(), sizes.tolist(), axes, strict=True)
    for operation, size, group, axis in calls:
        # Shapes do not show the group of an all-reduce, and groups of hybrid sharding have no axis.
        groups = along.get(axis) or AxisGroups(group, 1)
        if axis == "shard" and 1 < group == experts.size:
            groups = experts
        block = f" of group {groups.group_of(rank)}" if 0 < groups.size < world else ""
        # Each rank of an all-to-all may send another number of bytes.
        bytes_of_all = "" if operation.endswith("all-to-all") else f" {size}"
        keys.append(f"{operation}{bytes_of_all}{block}")
    return keys


def by_operation(calls: Calls, exposed_ns: Ints, span: tuple[int, int]) -> list[CollectiveTime]:
    """Calls inside `span` summed by operation, the most exposed first.

    `exposed_ns` has a value per call.
    """
    profiled, durations = calls.inside(span)
    operations = np.asarray(calls.operation)
    times = []
    for name in sorted(set(calls.operation)):
        mine = np.flatnonzero(profiled & (operations == name))
        if not len(mine):
            continue
        moved, sizes = calls.moved_bytes[mine], calls.group_size[mine]
        times.append(
            CollectiveTime(
                operation=name,
                calls=len(mine),
                total_ns=int(durations[mine].sum()),
                exposed_ns=int(exposed_ns[mine].sum()),
                moved_bytes=int(moved.sum()) if (moved >= 0).all() else None,
                # Groups of several sizes have no bandwidth in common.
                group_size=int(sizes[0]) if (sizes == sizes[0]).all() and sizes[0] > 0 else None,
            )
        )
    return sorted(times, key=lambda one: -one.exposed_ns)
