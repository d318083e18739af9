"""Traces of real ranks tell which axis of the mesh a collective belongs to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.rank.axes import axis_of_group, operation_along_axis
from shardwise.observe.summary import summarise
from tests.distributed.workers import Workers
from tests.gate import first_in_gate
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.trace_run import trace_step

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "head_dim": 16, "ffn": 96, "vocab": 104}
SPEC = reduced("llama", **SIZES)
MIXTURE = reduced("qwen3_moe", **SIZES)


@pytest.mark.parametrize(
    "strategy",
    first_in_gate(
        2,
        [
            {"kind": "zero3", "tensor": 2, "sequence_parallel": False},
            {"kind": "zero2", "context": 2},
            {"kind": "zero3", "context": 2, "tensor": 2},
            {"kind": "ddp", "tensor": 2, "sequence_parallel": False},
            {"kind": "zero3", "tensor": 2, "tensor_across_nodes": True},
            {"kind": "zero3", "expert": 2},
            {"kind": "zero3", "expert": 4},
            {"kind": "zero3", "context": 2, "expert": 2},
            {"kind": "zero3", "context": 2, "expert": 4},
        ],
    ),
    ids=str,
)
def test_a_trace_shows_what_was_counted(
    strategy: dict[str, Any], tmp_path: Path, workers: Workers
) -> None:
    case = {
        "model": (MIXTURE if "expert" in strategy else SPEC).model_dump(mode="json"),
        "strategy": {"param_dtype": "fp32", **strategy},
        "folder": str(tmp_path),
    }
    [counted] = workers.run(trace_step, 4, [case])
    summary = summarise([tmp_path / f"rank{rank}.json" for rank in range(4)])
    for rank, counts in zip(summary.ranks, counted, strict=True):
        expected: dict[str, tuple[int, int]] = {}
        for operation, _, axis, calls, size in counts:
            name = operation_along_axis(operation.replace("_", "-"), axis)
            before = expected.get(name, (0, 0))
            expected[name] = (before[0] + calls, before[1] + size)
        assert {one.operation: (one.calls, one.moved_bytes) for one in rank.collectives} == expected
    # All ranks of a group have the same keys, as often; those of other groups have others.
    keys = [Counter(rank.calls.key) for rank in summary.ranks]
    for key in set().union(*keys):
        seen = [found[key] for found in keys if found[key]]
        assert len(set(seen)) == 1
        assert len(seen) == (4 if "of group" not in key else 2)


def test_descriptions_of_meshes() -> None:
    described = ["17 mesh_tensor", "mesh_tp", "4 mesh_cp", "2 mesh_ep", "3 mesh_shard", ""]
    assert [axis_of_group(one) for one in described] == [
        "tensor",
        "tensor",
        "context",
        "expert",
        "",
        "",
    ]
