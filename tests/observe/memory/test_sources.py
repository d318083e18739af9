"""The other two sources of the same record: torch.profiler's raw timeline and our own runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.memory.read import read_memory
from shardwise.observe.memory.record import Memory
from shardwise.spec.record import SpecError

EXISTED, CREATED, CHANGED, DESTROYED = 1, 2, 3, 4
PARAMETER, OPTIMIZER, ACTIVATION, GRADIENT, UNKNOWN = 0, 1, 4, 5, 7


def read(tmp_path: Path, data: Any, name: str = "memory.json") -> Memory:
    text = json.dumps(data).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    (memory,) = read_memory(path)
    return memory


@pytest.mark.parametrize("name", ["timeline.raw.json", "timeline.raw.json.gz"])
def test_rows_sum_by_category(tmp_path: Path, name: str) -> None:
    memory = read(
        tmp_path,
        [
            [-1, EXISTED, 100, PARAMETER],
            [-1, EXISTED, 30, OPTIMIZER],
            [1_000, CREATED, 40, ACTIVATION],
            # A tensor written in place is an activation no more.
            [2_000, CHANGED, -40, ACTIVATION],
            [2_000, CHANGED, 40, GRADIENT],
            [3_000, CREATED, 7, UNKNOWN],
            [4_000_001_000, DESTROYED, -40, GRADIENT],
        ],
        name,
    )
    assert memory.curve.allocated == [130, 170, 130, 170, 177, 137]
    assert memory.curve.seconds == 4.0
    assert memory.peak == (4, 5, 177, None)
    assert [(share.category, share.bytes) for share in memory.categories] == [
        ("parameters", 100), ("gradients", 40), ("optimizer", 30), ("unknown", 7),
    ]  # fmt: skip
    assert memory.fragmentation is None
    assert memory.problems == ()


def test_what_is_freed_without_being_made_was_there_before(tmp_path: Path) -> None:
    memory = read(tmp_path, [[1, CREATED, 5, ACTIVATION], [2, DESTROYED, -9, GRADIENT]])
    assert memory.curve.allocated == [9, 14, 5]
    (problem,) = memory.problems
    assert problem.startswith("9 bytes were freed")


def test_rows_that_cannot_be_meant_are_counted(tmp_path: Path) -> None:
    odd = [[1, CREATED, -5, 0], [1, DESTROYED, 5, 0], [1, 9, 5, 0], [1, CREATED, 5, 99], "x", None,
           [1, CREATED, 1 << 60, 0], [1, CREATED, 5.5, 0], [1, CREATED, True, 0]]  # fmt: skip
    memory = read(tmp_path, [[1, CREATED, 5, 0], *odd])
    assert memory.peak.allocated_bytes == 5
    (problem,) = memory.problems
    assert problem.startswith(f"{len(odd)} malformed rows")


@pytest.mark.parametrize("kept", [0, 11])
def test_growth_between_steps_that_recur(tmp_path: Path, kept: int) -> None:
    rows: list[list[int]] = [[-1, EXISTED, 1000, PARAMETER]]
    for step in range(8):
        time = 1000 * (step + 1)
        rows.append([time, CREATED, 500, ACTIVATION])
        rows.append([time + 1, CREATED, 300, GRADIENT])
        if kept:
            rows.append([time + 2, CREATED, kept, UNKNOWN])
        rows.append([time + 3, DESTROYED, -500, ACTIVATION])
        rows.append([time + 4, DESTROYED, -300, GRADIENT])
    leak = read(tmp_path, rows).leak
    assert leak.found is bool(kept)
    assert leak.bytes_per_step == (kept or None)
    assert leak.place == ("unknown" if kept else None)


def run_of(points: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"schema": 1, "kind": "measured", "rank": 0, "step": 4, "every": 1,
            "terms": ["parameters", "working"], "points": points, **more}  # fmt: skip


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "memory.json").write_text(
        json.dumps(run_of([[0, 10_000, 4], [3, 10_000, 900], [9, 10_000, 8]]))
    )
    (memory,) = read_memory(tmp_path)
    assert memory.curve.allocated == [10_004, 10_900, 10_008]
    assert memory.peak.event == 1
    assert [(one.category, one.bytes) for one in memory.categories] == [
        ("parameters", 10_000), ("working", 900),
    ]  # fmt: skip
    assert memory.leak.found is False
    assert (memory.leak.reason, memory.leak.steps) == ("no_growth", 1)


def test_a_step_that_ends_with_more_is_told(tmp_path: Path) -> None:
    memory = read(tmp_path, run_of([[0, 10_000, 4], [9, 10_000, 504]]))
    assert memory.leak.found is True
    assert (memory.leak.bytes_per_step, memory.leak.place) == (500, "working")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("[", "not valid JSON"),
        ("{}", "neither"),
        ("[]", "no rows"),
        ("[[1, 2], [3, 4]]", "aggregated timeline"),
        ('{"schema": 9, "points": []}', "schema 9"),
        ('{"schema": 1, "points": []}', "needs a list of terms"),
        ('{"schema": 1, "terms": ["a"], "points": []}', "no valid point"),
        ('{"schema": 1, "terms": ["a", "a"], "points": [[1, 2, 3]]}', "needs a list of terms"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_json_that_cannot_be_read_is_one_sentence(tmp_path: Path, data: str, said: str) -> None:
    path = tmp_path / "memory.json"
    path.write_text(data)
    with pytest.raises(SpecError, match=said) as caught:
        read_memory(path)
    assert len(caught.value.problems) == 1


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read .*missing: No such file"):
        read_memory(tmp_path / "missing")
    with pytest.raises(SpecError, match="no memory.json"):
        read_memory(tmp_path)
