"""Four parts that sum to the window, against counting nanosecond by nanosecond."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.step.breakdown import breakdown
from shardwise.step.chrome import write_chrome
from shardwise.step.intervals import overlap_length, uncovered_length, union
from shardwise.step.spans import KINDS, Kind, Timeline, TimelineBuilder

SPAN = st.tuples(st.integers(0, 60), st.integers(0, 25), st.sampled_from(KINDS), st.integers(0, 2))


def timeline(spans: list[tuple[int, int, Kind, int]]) -> Timeline:
    builder = TimelineBuilder()
    for start, length, kind, lane in spans:
        builder.add(f"lane {lane}", start * 1e-9, (start + length) * 1e-9, kind, kind)
    return builder.build()


@given(st.lists(SPAN, max_size=30), st.integers(0, 40), st.integers(1, 60))
def test_parts_are_what_counting_finds(
    spans: list[tuple[int, int, Kind, int]], begin: int, length: int
) -> None:
    found = breakdown(timeline(spans), (begin, begin + length))
    busy = {kind: np.zeros(200, dtype=bool) for kind in KINDS}
    for start, size, kind, _ in spans:
        busy[kind][start : start + size] = True
    inside = slice(begin, begin + length)
    k, c, m = (busy[kind][inside] for kind in KINDS)
    assert found.compute_ns == k.sum()
    assert found.exposed_communication_ns == (c & ~k).sum()
    assert found.exposed_copy_ns == (m & ~k & ~c).sum()
    assert found.idle_ns == (~k & ~c & ~m).sum()
    assert found.overlapped_ns == (c & k).sum()
    assert sum(found[:4]) == found.window_ns == length
    assert found.overlap == (pytest.approx((c & k).sum() / c.sum()) if c.any() else None)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-3, 9)), max_size=12))
def test_unions_are_sorted_and_apart(spans: list[tuple[int, int]]) -> None:
    start = np.asarray([s for s, _ in spans], dtype=np.int64)
    end = start + np.asarray([length for _, length in spans], dtype=np.int64)
    found = union(start, end)
    covered = {i for s, e in zip(start, end, strict=True) for i in range(s, e)}
    assert found.length == len(covered)
    assert (found.start[1:] > found.end[:-1]).all()
    assert overlap_length(found, found) == found.length
    assert uncovered_length(found, found) == 0


def test_an_empty_timeline() -> None:
    found = breakdown(timeline([]))
    assert found.window_ns == 0
    assert found.overlap is None


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_chrome_trace_holds_every_span(tmp_path: Path, name: str) -> None:
    builder = TimelineBuilder()
    builder.add("compute", 0.0, 2e-6, "compute", "forward", "layers.0")
    builder.add("all-gather", 1e-6, 3.5e-6, "communication", "all-gather", "layers.1", 4096)
    write_chrome(tmp_path / name, builder.build(), {"kind": "simulated"})
    raw = (tmp_path / name).read_bytes()
    trace = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["ts"], e["dur"], e["cat"], e.get("args")) for e in spans] == [
        (0.0, 2.0, "compute", {"unit": "layers.0"}),
        (1.0, 2.5, "communication", {"unit": "layers.1", "bytes": 4096}),
    ]
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {"compute", "all-gather"}
    assert trace["otherData"] == {"kind": "simulated"}
