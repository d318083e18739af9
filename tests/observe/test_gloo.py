"""Gloo's events and the operations that asked for them, where the two are not in one order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.observe.summary import summarise


def event(name: str, start: float, thread: int, dims: Any, types: list[str]) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": 5.0,
        "args": {"Input Dims": dims, "Input type": types},
    }


def test_a_call_carried_out_late_keeps_its_bytes(tmp_path: Path) -> None:
    """Four 64-bit integers are asked for first and carried out last; groups are half the world."""
    reduce, integers = "c10d::allreduce_", ["TensorList", ""]
    events = [
        event("aten::mm", 0, 1, [[2, 2], [2, 2]], ["float", "float"]),
        event(reduce, 10, 1, [[[4]], []], integers),
        event("c10d::_reduce_scatter_base_", 20, 1, [[50], [100], []], ["float", "float", ""]),
        event("c10d::_allgather_base_", 30, 1, [[60], [30], []], ["c10::BFloat16"] * 2 + [""]),
        event("gloo:all_reduce", 21, 2, [[100]], ["float"]),
        event("gloo:all_gather", 31, 2, [[30]], ["c10::BFloat16"]),
        event("gloo:all_reduce", 41, 3, [[4]], ["long int"]),
    ]
    about = {"distributedInfo": {"rank": 0, "world_size": 4}}
    file = tmp_path / "rank0.json"
    file.write_text(json.dumps({**about, "traceEvents": events}))
    found = summarise([file]).ranks[0].collectives
    assert {one.operation: (one.calls, one.moved_bytes) for one in found} == {
        "all-reduce": (1, 4 * 8),
        "reduce-scatter": (1, 100 * 4),
        "all-gather": (1, 60 * 2),
    }
