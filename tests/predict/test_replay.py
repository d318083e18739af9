"""A predicted step as a timeline agrees with the figures that were predicted for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.predict.api import estimate_run, replay_run
from shardwise.spec.question import describe_run
from shardwise.step.breakdown import breakdown
from shardwise.step.chrome import write_chrome
from tests.units.reduced import reduced

CASES: list[dict[str, Any]] = [
    {"strategy": "zero3", "recompute": "full"},
    {"strategy": "zero2", "accumulate": 3},
    {"strategy": "zero1", "accumulate": 2, "recompute": 0.5},
    {"strategy": "hsdp", "accumulate": 2},
    {"strategy": "ddp", "recompute": "selective"},
    {"strategy": "ddp", "loss": "chunked", "accumulate": 3},
    {"strategy": "zero3", "loss": "chunked", "loss_chunks": 5, "split_root": False},
    {"strategy": "zero3", "prefetch": 2, "blocks_per_unit": 4, "forward_prefetch": 1},
]


@pytest.mark.parametrize("settings", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_it_tells_what_the_estimate_tells(settings: dict[str, Any]) -> None:
    run = describe_run("llama-3.2-1b", "2x8xA100-80GB@200Gbps", seq_len=2048, **settings)
    profile, timeline = estimate_run(run), replay_run(run)
    assert timeline is not None
    assert profile.time is not None
    start, end = timeline.window
    assert start == 0
    assert end / 1e9 == pytest.approx(profile.time.step_s, rel=1e-6)
    parts = breakdown(timeline)
    computed = (profile.time.compute_s or 0) + (profile.time.optimizer_s or 0)
    assert parts.compute_ns / 1e9 == pytest.approx(computed, rel=1e-5)
    # The counter reaches the predicted peak, and no higher.
    assert int(timeline.memory_bytes.max()) == pytest.approx(
        profile.known_memory.peak_allocated_bytes, rel=1e-6
    )
    assert (timeline.memory_ns[1:] >= timeline.memory_ns[:-1]).all()
    assert 0 <= timeline.memory_ns.min() <= timeline.memory_ns.max() <= end
    gathers = sum(c.calls for c in profile.traffic if c.op == "all_gather")
    assert (timeline.lane == timeline.lanes.index("all-gather")).sum() == gathers


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full", 0.5])
@pytest.mark.parametrize("layers", [1, 4])
def test_small_models_peak_alike_on_the_timeline_and_in_the_estimate(
    layers: int, recompute: Any, accumulate: int
) -> None:
    """With few blocks the forward itself can be the peak."""
    model = reduced("llama", layers=layers, vocab=300)
    settings = {"recompute": recompute, "accumulate": accumulate, "seq_len": 512}
    run = describe_run(model, "1x2xH100-SXM", "zero3", **settings)
    timeline = replay_run(run)
    assert timeline is not None
    peak = estimate_run(run).known_memory.peak_allocated_bytes
    assert int(timeline.memory_bytes.max()) == pytest.approx(peak, rel=1e-6)


def test_the_file_opens_as_a_trace(tmp_path: Path) -> None:
    run = describe_run("gpt2", "2x8xA100-80GB@200Gbps", "zero3")
    timeline = replay_run(run)
    assert timeline is not None
    write_chrome(tmp_path / "step.json", timeline)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {
        *("compute", "copy", "optimizer"),
        *("all-gather", "reduce-scatter", "all-reduce"),
    }
    assert any(e["ph"] == "C" and e["name"] == "memory" for e in events)
