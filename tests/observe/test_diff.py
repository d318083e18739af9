"""Two traces: planted differences are found, noise is not, and the exit code says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.diff import Diff, compare, short_name
from shardwise.observe.summary import summarise
from tests.command import shardwise


def trace(path: Path, kernels: dict[str, list[float]], step: float = 1000.0) -> Path:
    """Three steps; of each kernel one call a step, its length per step given in microseconds."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        begin = number * step
        events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}",
                       "pid": 1, "tid": 1, "ts": begin, "dur": step, "args": {}})  # fmt: skip
        at = begin
        for name, lengths in kernels.items():
            events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": at,
                           "dur": lengths[number],
                           "args": {"device": 0, "stream": 7, "correlation": 1}})  # fmt: skip
            at += lengths[number]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def diff_of(one: Path, other: Path) -> Diff:
    return compare(*(summarise([path], timelines=True).ranks[0] for path in (one, other)))


BASE = {"void gemm<float>(int)": [300, 301, 299], "norm": [50, 90, 60], "old": [40, 40, 40]}


def test_planted_differences_are_found_and_noise_is_not(tmp_path: Path) -> None:
    before = trace(tmp_path / "a.json", BASE)
    changed = {"void gemm<float>(int)": [400, 401, 399], "norm": [70, 65, 85], "new": [30, 30, 30]}
    after = trace(tmp_path / "b.json", changed, step=1200.0)
    found = diff_of(before, after)
    told = {d.name: d.change for d in found.differences}
    assert told == {"gemm": "slower", "norm": "same", "old": "removed", "new": "added"}
    assert found.differences[0].name == "gemm"
    assert found.differences[0].delta_ns == 100_000
    assert found.regressed
    back = diff_of(after, before)
    assert {d.name: d.change for d in back.differences}["gemm"] == "faster"
    assert not back.regressed


def test_a_trace_differs_from_itself_in_nothing(tmp_path: Path) -> None:
    path = trace(tmp_path / "a.json", BASE)
    found = diff_of(path, path)
    assert not found.regressed
    assert {d.change for d in found.differences} == {"same"}


def test_names_lose_what_no_person_reads() -> None:
    text = "void at::native::vectorized_elementwise_kernel<4, at::Fill<float> >(int, float)"
    assert short_name(text) == "at::native::vectorized_elementwise_kernel"
    assert short_name("(x)") == "unnamed"


@pytest.mark.parametrize(("step", "code"), [(1000.0, 0), (1500.0, 1)])
def test_the_exit_code_says_whether_it_got_slower(tmp_path: Path, step: float, code: int) -> None:
    one, other = trace(tmp_path / "a.json", BASE), trace(tmp_path / "b.json", BASE, step)
    done = shardwise("diff", str(one), str(other))
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("Slower beyond noise." if code else "No regression.")
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
