"""Write a timeline as a Chrome trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.step.spans import KINDS, Timeline


def chrome_events(
    timeline: Timeline, process: str = "rank 0", pid: int = 0
) -> list[dict[str, Any]]:
    """A timeline as Chrome trace events: lanes as threads, memory as a counter, microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    ]
    for number, lane in enumerate(timeline.lanes):
        shared = {"ph": "M", "pid": pid, "tid": number}
        events.append({**shared, "name": "thread_name", "args": {"name": lane}})
        events.append({**shared, "name": "thread_sort_index", "args": {"sort_index": number}})
    columns = zip(
        timeline.lane.tolist(),
        timeline.start_ns.tolist(),
        timeline.end_ns.tolist(),
        timeline.kind.tolist(),
        timeline.name.tolist(),
        timeline.unit.tolist(),
        timeline.bytes.tolist(),
        strict=True,
    )
    for lane_number, start, end, kind, name, unit, size in columns:
        about: dict[str, Any] = {}
        if unit >= 0:
            about["unit"] = timeline.units[unit]
        if size:
            about["bytes"] = size
        events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": lane_number,
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "cat": KINDS[kind],
                "name": timeline.names[name],
                **({"args": about} if about else {}),
            }
        )
    memory = zip(timeline.memory_ns.tolist(), timeline.memory_bytes.tolist(), strict=True)
    events.extend(
        {"ph": "C", "pid": pid, "name": "memory", "ts": when / 1000, "args": {"bytes": size}}
        for when, size in memory
    )
    return events


def write_chrome(path: Path, timeline: Timeline, about: Mapping[str, Any] | None = None) -> None:
    """Write a trace file, compressed if the name ends with .gz."""
    write_events(path, chrome_events(timeline), about)


def write_events(
    path: Path, events: list[dict[str, Any]], about: Mapping[str, Any] | None = None
) -> None:
    """Write Chrome trace events to a file, compressed if the name ends with .gz."""
    text = json.dumps({"traceEvents": events, "otherData": dict(about or {})}, allow_nan=False)
    packed = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    path.write_bytes(packed)
