"""Time by FSDP unit: real traces of a CPU, and synthetic ones of a device with known truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rules import read_rules
from shardwise.observe.summary import summarise
from shardwise.spec.record import SpecError

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "fsdp2_cpu_gloo"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="needs traces beside the project")


def rank_of(name: str) -> RankSummary:
    return summarise([TRACES / f"{name}.json.gz"]).ranks[0]


@needs_traces
@pytest.mark.parametrize("name", ["sync_rank0", "sync_noreshard_rank0", "async_prefetch_rank1"])
def test_units_and_collectives_are_the_same_time(name: str) -> None:
    """Every call belongs to one unit, in three steps of a model of four blocks and a root."""
    rank = rank_of(name)
    assert [u.unit for u in rank.units] == ["root", *(f"layers.{i}" for i in range(4))]
    calls = {one.operation: one for one in rank.collectives}
    assert sum(u.gathers for u in rank.units) == calls["all-gather"].calls
    assert sum(u.scatters for u in rank.units) == calls["reduce-scatter"].calls == 15
    gathered = sum(u.gather_forward_ns + u.gather_backward_ns for u in rank.units)
    assert gathered == calls["all-gather"].total_ns
    assert sum(u.scatter_ns for u in rank.units) == calls["reduce-scatter"].total_ns


@needs_traces
def test_what_is_not_resharded_is_gathered_once() -> None:
    again, once = rank_of("sync_rank0").units, rank_of("sync_noreshard_rank0").units
    assert [u.gathers for u in again] == [3, 6, 6, 6, 6]
    assert [u.gathers for u in once] == [3, 3, 3, 3, 3]
    assert all(u.gather_backward_ns == 0 for u in once)


@needs_traces
def test_waiting_hooks_hide_nothing_and_prefetch_does() -> None:
    for unit in rank_of("sync_rank0").units:
        assert unit.gather_backward_exposed_ns == unit.gather_backward_ns
    hidden = [
        1 - u.gather_backward_exposed_ns / u.gather_backward_ns
        for u in rank_of("async_prefetch_rank0").units
        if u.gather_backward_ns
    ]
    assert max(hidden) > 0.9


def synthetic(tmp_path: Path) -> Path:
    """A device trace made by hand: one block, gathered half hidden, reduced in the open."""
    events: list[dict[str, Any]] = []

    def note(name: str, start: float, end: float) -> None:
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1,
                       "ts": start, "dur": end - start, "args": {}})  # fmt: skip

    def kernel(name: str, asked: float, start: float, end: float, stream: int) -> None:
        number = len(events)
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 1,
                "tid": 1,
                "ts": asked,
                "dur": 0.5,
                "args": {"correlation": number},
            }
        )
        events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream,
                       "ts": start, "dur": end - start,
                       "args": {"device": 0, "stream": stream, "correlation": number}})  # fmt: skip

    note("FSDP::pre_forward (block)", 0, 10)
    note("FSDP::all_gather (block)", 1, 5)
    kernel("other_compute", 0.5, 10, 30, 7)
    kernel("ncclDevKernel_AllGather_RING", 2, 20, 40, 20)
    kernel("gemm", 12, 40, 70, 7)
    note("FSDP::post_forward (block)", 15, 16)
    note("FSDP::pre_backward (block)", 20, 25)
    kernel("gemm_backward", 27, 70, 130, 7)
    note("FSDP::post_backward_accumulate (block)", 30, 31)
    note("FSDP::post_backward_reduce (block)", 32, 40)
    kernel("ncclDevKernel_ReduceScatter_RING", 35, 130, 150, 20)
    path = tmp_path / "synthetic.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_synthetic_device_trace_is_told_exactly(tmp_path: Path) -> None:
    (rank,) = summarise([synthetic(tmp_path)]).ranks
    (unit,) = rank.units
    assert unit.unit == "block"
    assert (unit.gathers, unit.scatters) == (1, 1)
    assert unit.forward_ns == 30_000
    assert unit.backward_ns == 60_000
    assert (unit.gather_forward_ns, unit.gather_forward_exposed_ns) == (20_000, 10_000)
    assert (unit.scatter_ns, unit.scatter_exposed_ns) == (20_000, 20_000)
    assert rank.full_trace.compute_ns == 110_000
    assert rank.full_trace.exposed_communication_ns == 30_000


def test_rules_come_before_names(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('communication = ["^gemm"]\ncopy = ["other"]\n')
    (rank,) = summarise([synthetic(tmp_path)], read_rules(rules)).ranks
    assert rank.full_trace.compute_ns == 0
    assert rank.full_trace.communication_ns == 130_000
    for text, said in (
        ("comunication = []", "did you mean 'communication'"),
        ("copy = 3", "rules.copy: must be a list"),
        ('copy = ["("]', "is not a valid regular expression"),
    ):
        rules.write_text(text)
        with pytest.raises(SpecError, match=said):
            read_rules(rules)


def test_a_stranger_among_collectives_is_told(tmp_path: Path) -> None:
    path = synthetic(tmp_path)
    trace = json.loads(path.read_text())
    trace["traceEvents"].append(
        {"ph": "X", "cat": "kernel", "name": "one_shot_push", "pid": 0, "tid": 20, "ts": 160.0,
         "dur": 5.0, "args": {"device": 0, "stream": 20, "correlation": 999}}
    )  # fmt: skip
    path.write_text(json.dumps(trace))
    (rank,) = summarise([path]).ranks
    (problem,) = rank.problems
    assert "'one_shot_push'" in problem


def test_a_process_groups_note_on_the_stream_makes_a_collective(tmp_path: Path) -> None:
    """Before its name is looked at; the same kernel on another stream computes."""
    path = synthetic(tmp_path)
    trace = json.loads(path.read_text())
    about = {"ph": "X", "pid": 0, "ts": 160.0, "dur": 5.0}
    for stream in (20, 7):
        trace["traceEvents"].append(
            {**about, "cat": "kernel", "name": "one_shot_push", "tid": stream,
             "args": {"device": 0, "stream": stream, "correlation": 900 + stream}}
        )  # fmt: skip
    trace["traceEvents"].append(
        {**about, "cat": "gpu_user_annotation", "name": "nccl:all_reduce", "tid": 20, "args": {}}
    )
    path.write_text(json.dumps(trace))
    (rank,) = summarise([path]).ranks
    assert not rank.problems
    assert rank.full_trace.communication_ns == (20 + 20 + 5) * 1000
    assert rank.full_trace.compute_ns == (110 + 5) * 1000
