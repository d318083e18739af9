"""A simulated step written as a trace and read back: both sides agree, and planted errors show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.observe.against import (
    chrome_comparison,
    compare_rank,
    predicted_units,
    traffic_terms,
)
from shardwise.observe.rank.summary import summarise_rank
from shardwise.predict.api import estimate_run, replay_run
from shardwise.spec.question import describe_run
from shardwise.spec.run import RunSpec, write_run
from shardwise.step.spans import Timeline
from tests.command import shardwise

STREAMS = {"compute": 7, "optimizer": 7, "copy": 7, "all-gather": 20, "reduce-scatter": 24,
           "all-reduce": 28}  # fmt: skip


def simulated(**settings: Any) -> tuple[RunSpec, Timeline]:
    run = describe_run("llama-2-7b", "2x8xA100-80GB@200Gbps", "zero3", **settings)
    timeline = replay_run(run)
    assert timeline is not None
    return run, timeline


def as_trace(path: Path, timeline: Timeline, slower: float = 1.0) -> Path:
    """The spans as kernels with their launches and FSDP2's annotations; reductions are slowed."""
    events: list[dict[str, Any]] = []
    host = 0.0

    def add(category: str, name: str, start: float, length: float, **more: Any) -> None:
        events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start,
                       "dur": length, "args": {}, **more})  # fmt: skip

    order = np.argsort(timeline.start_ns, kind="stable").tolist()
    last: dict[str, str] = {}
    reached = 0
    for number, row in enumerate(order, 1):
        lane, name = timeline.lanes[timeline.lane[row]], timeline.names[timeline.name[row]]
        at = int(timeline.unit[row])
        unit = timeline.units[at].replace("block ", "layers.") if at >= 0 else ""
        label = f" ({unit})" if unit and unit != "root" else ""
        begin, end = int(timeline.start_ns[row]), int(timeline.end_ns[row])
        if name == "reduce-scatter":
            end = begin + round((end - begin) * slower)
        reached = max(reached, end)
        host += 10
        add("cuda_runtime", "cudaLaunchKernel", host + 2, 1, args={"correlation": number})
        kernel = f"nccl_{name}" if STREAMS[lane] > 7 else name
        add("kernel", kernel.replace("-", ""), begin / 1000, (end - begin) / 1000, pid=0,
            args={"device": 0, "stream": STREAMS[lane], "correlation": number})  # fmt: skip
        if name == "all-gather":
            add("user_annotation", f"FSDP::all_gather{label}", host + 1, 4)
            # Resharded after the forward, so that a unit's gathers take turns.
            if last.get(unit) == "forward" and unit != "root":
                add("user_annotation", f"FSDP::pre_backward{label}", host, 6)
        elif name == "reduce-scatter":
            add("user_annotation", f"FSDP::post_backward_reduce{label}", host, 6)
        elif name in ("forward", "backward") and lane == "compute":
            last[unit] = name
            after = "post_forward" if name == "forward" else "post_backward_accumulate"
            add("user_annotation", f"FSDP::pre_{name}{label}", host, 1)
            add("user_annotation", f"FSDP::{after}{label}", host + 4, 1)
    add("gpu_user_annotation", "ProfilerStep#7", 0, reached / 1000, pid=0)
    path.write_text(json.dumps({"distributedInfo": {"rank": 0, "world_size": 16},
                                "traceEvents": events}))  # fmt: skip
    return path


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"prefetch": 0, "micro_batch": 2}])
def test_what_was_simulated_is_read_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    _, timeline = simulated(**settings)
    rank = summarise_rank(as_trace(tmp_path / "t.json", timeline))
    found = compare_rank(timeline, rank)
    assert [term.name for term in found.terms][:3] == ["step", "compute", "exposed communication"]
    for term in found.terms:
        assert term.first == pytest.approx(term.second, abs=2)
    assert [unit.unit for unit in found.units] == [f"layers.{i}" for i in range(32)]
    for unit in found.units:
        for term in unit.terms:
            assert term.first == pytest.approx(term.second, abs=20)
            assert (term.first or 0) > 0


def test_only_what_was_slower_differs(tmp_path: Path) -> None:
    _, timeline = simulated()
    rank = summarise_rank(as_trace(tmp_path / "t.json", timeline, slower=1.25))
    for unit in compare_rank(timeline, rank).units:
        errors = {term.name: term.error for term in unit.terms}
        assert errors["scatter"] == pytest.approx(1 / 1.25 - 1, abs=1e-6)
        assert errors["forward"] == pytest.approx(0, abs=1e-6)


def test_units_of_a_simulated_step_are_all_of_its_time() -> None:
    _, timeline = simulated(accumulate=2)
    units = predicted_units(timeline)
    names = np.asarray(timeline.names, dtype=object)[timeline.name]
    lasted = timeline.end_ns - timeline.start_ns
    gathered = sum(u.gather_forward_ns + u.gather_backward_ns for u in units)
    assert gathered == lasted[names == "all-gather"].sum()
    assert sum(u.scatter_ns for u in units) == lasted[names == "reduce-scatter"].sum()
    assert sum(u.forward_ns for u in units) == lasted[names == "forward"].sum()


def test_both_steps_begin_together_in_one_file() -> None:
    _, timeline = simulated()
    begin, end = timeline.window
    middle = (begin + end) // 2
    events = chrome_comparison(timeline, timeline, (middle, end))
    measured = [e for e in events if e["pid"] == 1 and e["ph"] == "X"]
    assert min(e["ts"] for e in measured) == 0
    assert max(e["ts"] + e["dur"] for e in measured) == pytest.approx((end - middle) / 1000)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "simulated", "measured"}  # fmt: skip


def test_the_command_shows_both(tmp_path: Path) -> None:
    run, timeline = simulated()
    trace = as_trace(tmp_path / "t.json", timeline)
    file = tmp_path / "run.toml"
    file.write_text(write_run(run))
    both = tmp_path / "both.json"
    words = ("trace", str(trace), "--run", str(file), "--timeline", str(both))
    done = shardwise(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(both.read_text())["traceEvents"]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    told = json.loads(shardwise("trace", str(trace), "--run", str(file), "--json").stdout)
    assert len(told["against"]["units"]) == 32
    rank = summarise_rank(trace)
    terms = {t.name: t for t in traffic_terms(estimate_run(run).traffic, rank)}
    # A gather for every unit and pass but the root's second, a reduction for each.
    assert terms["all-gather: calls"] == ("all-gather: calls", "calls", 65, 65)
    assert terms["reduce-scatter: calls"] == ("reduce-scatter: calls", "calls", 33, 33)
