"""What one rank's trace says: where its time went, step by step and by collective."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from shardwise.observe.classify import (
    Rules,
    device_timeline,
    host_timeline,
    on_device,
    unrecognised,
)
from shardwise.observe.gloo import gloo_calls
from shardwise.observe.ranks import Joined, join
from shardwise.observe.trace import Ints, Trace, read_trace
from shardwise.observe.units import UnitTime, unit_times
from shardwise.spec.record import SpecError
from shardwise.timeline.breakdown import Breakdown, breakdown
from shardwise.timeline.intervals import minus, union
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


class CollectiveTime(NamedTuple):
    """All calls of one operation; `bytes` is None where the trace does not tell them."""

    operation: str
    calls: int
    total_ns: int
    exposed_ns: int
    moved_bytes: int | None


class RankSummary(NamedTuple):
    """One trace. Figures are of a device, or of the threads of a process on a CPU."""

    path: Path
    rank: int | None
    on_cpu: bool
    timeline: Timeline
    whole: Breakdown
    # Profiled steps, where they were marked: from when to when, and what they consist of.
    windows: list[tuple[int, int]]
    steps: list[Breakdown]
    collectives: list[CollectiveTime]
    # Empty where FSDP2 left no annotations.
    units: list[UnitTime]
    problems: list[str]


class Summary(NamedTuple):
    """One or more ranks of a run."""

    ranks: list[RankSummary]
    joined: Joined | None


_BYTES = {"float": 4, "bfloat16": 2, "half": 2, "double": 8, "int": 4, "long": 8, "byte": 1}


def summarise(paths: list[Path], rules: Rules | None = None) -> Summary:
    """Read traces one after the other; only their timelines are kept."""
    ranks = sorted((_summarise(read_trace(path), rules) for path in paths), key=_order)
    _check_ranks(ranks)
    joined = None
    if len(ranks) > 1 and not any(r.on_cpu for r in ranks):
        joined = join([r.timeline for r in ranks])
    return Summary(ranks, joined if joined is not None and joined.start_ns.size else None)


def _order(rank: RankSummary) -> tuple[int, str]:
    return (rank.rank if rank.rank is not None else 2**31, str(rank.path))


def _check_ranks(ranks: list[RankSummary]) -> None:
    seen = [r.rank for r in ranks if r.rank is not None]
    if len(set(seen)) < len(seen):
        twice = sorted({rank for rank in seen if seen.count(rank) > 1})
        raise SpecError(f"trace: rank {twice[0]} is given more than once; give one file per rank")


def _summarise(trace: Trace, rules: Rules | None) -> RankSummary:
    on_cpu = not on_device(trace).any()
    timeline = host_timeline(trace) if on_cpu else device_timeline(trace, rules)
    if not len(timeline):
        raise SpecError(f"trace: nothing in {trace.path} tells what a device or thread did")
    problems = list(trace.problems)
    world = trace.world_size
    if world is not None and world > 1 and not timeline.of_kind("communication").any():
        problems.append(f"no communication is in it, though it is of {world} ranks")
    unknown = [] if on_cpu else unrecognised(trace, timeline)
    if unknown:
        problems.append(
            f"{len(unknown)} kinds of kernels run among collectives and count as compute, such as "
            f"{unknown[0][:40]!r}; --rules can say what they are"
        )
    windows = _steps(trace, timeline)
    return RankSummary(
        path=trace.path,
        rank=trace.rank,
        on_cpu=on_cpu,
        timeline=timeline,
        whole=breakdown(timeline),
        windows=windows,
        steps=[breakdown(timeline, window) for window in windows],
        collectives=_gloo(trace, timeline) if on_cpu else _collectives(trace, timeline),
        units=unit_times(trace, timeline),
        problems=problems,
    )


def _steps(trace: Trace, timeline: Timeline) -> list[tuple[int, int]]:
    """Windows of the profiled steps: the device's, or the host's where those cover more."""
    begin, end = timeline.window
    found: list[tuple[int, int]] = []
    for category in ("gpu_user_annotation", "user_annotation", "Operator"):
        windows = {
            (int(trace.start_ns[row]), int(trace.end_ns[row]))
            for row in np.flatnonzero(trace.in_category(category)).tolist()
            if trace.texts[trace.name[row]].startswith("ProfilerStep")
        }
        inside = sorted((s, e) for s, e in windows if s < end and e > begin and e > s)
        if sum(e - s for s, e in inside) > 1.1 * sum(e - s for s, e in found):
            found = inside
    return found


def _collectives(trace: Trace, timeline: Timeline) -> list[CollectiveTime]:
    """Kernels that communicate, by operation."""
    moving = np.flatnonzero(timeline.of_kind("communication"))
    start, end = timeline.start_ns[moving], timeline.end_ns[moving]
    operations = _operations(trace, timeline, moving)
    sizes = _sizes(trace)
    moved = [sizes.get((int(s), int(e))) for s, e in zip(start, end, strict=True)]
    return _by_operation(operations, start, end, moved, timeline)


def _gloo(trace: Trace, timeline: Timeline) -> list[CollectiveTime]:
    """Collectives of a CPU run: whole events of Gloo's threads, not the pieces inside them."""
    calls = gloo_calls(trace)
    told = calls.carried if calls.asked is None else calls.asked
    operations = [operation_of(trace.texts[code]) for code in trace.name[told].tolist()]
    world = trace.world_size
    moved = []
    for row, operation in zip(calls.carried.tolist(), operations, strict=True):
        size = _shape_bytes(trace, row)
        if size is not None and operation == "all-gather":
            size = size * world if world else None
        moved.append(size)
    start, end = trace.start_ns[calls.carried], trace.end_ns[calls.carried]
    return _by_operation(operations, start, end, moved, timeline)


def _by_operation(
    operations: list[str], start: Ints, end: Ints, moved: list[int | None], timeline: Timeline
) -> list[CollectiveTime]:
    """Calls summed by operation, the most exposed first."""
    compute = timeline.covered("compute")
    found = []
    for name in sorted(set(operations)):
        mine = [index for index, operation in enumerate(operations) if operation == name]
        known = [moved[index] for index in mine]
        found.append(
            CollectiveTime(
                operation=name,
                calls=len(mine),
                total_ns=int((end[mine] - start[mine]).sum()),
                exposed_ns=minus(union(start[mine], end[mine]), compute),
                moved_bytes=None if None in known else sum(size or 0 for size in known),
            )
        )
    return sorted(found, key=lambda one: -one.exposed_ns)


def _shape_bytes(trace: Trace, row: int) -> int | None:
    """Bytes of the first input, where shapes were recorded."""
    try:
        dims = msgspec.json.decode(trace.shapes[row])[0]
        kind = str(msgspec.json.decode(trace.types[row])[0]).removeprefix("c10::").lower()
        return math.prod(int(size) for size in dims) * _BYTES[kind]
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return None


def operation_of(text: str) -> str:
    """What a collective is called here, by what a kernel, metadata or operation calls it."""
    matching = (op for op, pattern in _OPERATIONS.items() if pattern.search(text))
    return next(matching, "unnamed collective")


def _operations(trace: Trace, timeline: Timeline, rows: Ints) -> list[str]:
    """By metadata where there is some, else by name."""
    told = {
        (int(trace.start_ns[row]), int(trace.end_ns[row])): trace.texts[code]
        for row, code in zip(trace.collective_row.tolist(), trace.collective.tolist(), strict=True)
    }
    names: dict[str, str] = {}

    found = []
    for row in rows.tolist():
        key = (int(timeline.start_ns[row]), int(timeline.end_ns[row]))
        text = told.get(key) or timeline.names[timeline.name[row]]
        if text not in names:
            names[text] = operation_of(text)
        found.append(names[text])
    return found


def _sizes(trace: Trace) -> dict[tuple[int, int], int]:
    """Bytes of the whole group's message, by when a collective ran."""
    found = {}
    columns = zip(
        trace.collective_row.tolist(), trace.elements.tolist(), trace.dtype.tolist(), strict=True
    )
    for row, elements, dtype in columns:
        size = _BYTES.get(trace.texts[dtype].lower()) if dtype >= 0 else None
        if size is not None and elements >= 0:
            found[int(trace.start_ns[row]), int(trace.end_ns[row])] = elements * size
    return found
