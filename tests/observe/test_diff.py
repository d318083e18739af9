"""Two traces: planted differences are found, noise is not, and the exit code says which."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.diff import Diff, compare, short_name
from shardwise.observe.summary import summarise
from tests.command import shardwise
from tests.observe.synthetic import Plan, build
from tests.screens import assert_screen

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def trace(path: Path, kernels: Mapping[str, Sequence[float]], step: float = 1000.0) -> Path:
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
    done = shardwise("trace", str(other), "--against", str(one))
    assert done.returncode == code, done.stderr
    found = json.loads(shardwise("trace", str(other), "--against", str(one), "--json").stdout)
    assert found["regressed"] is bool(code)
    assert found["after"]["step_ns"] == step * 1000


def test_the_screen_shows_changes_beyond_noise(tmp_path: Path) -> None:
    before = trace(tmp_path / "a.json", BASE)
    changed = {"void gemm<float>(int)": [400, 401, 399], "norm": [70, 65, 85], "new": [30, 30, 30]}
    after = trace(tmp_path / "b.json", changed, step=1200.0)
    done = shardwise("trace", str(after), "--against", str(before))
    assert done.returncode == 1, done.stderr
    assert_screen("diff-regression", done.stdout)
    assert_screen("diff-same", shardwise("trace", str(before), "--against", str(before)).stdout)


@pytest.mark.parametrize(
    ("slower", "part", "milliseconds"),
    [
        (Plan(forward=4000, backward=8000, data=9000), "data_loading", 9.0),
        (Plan(forward=4000, backward=8000, malloc=7000), "allocator", 7.0),
        (Plan(forward=4000, backward=8000, synchronised=6000), "synchronisation", 6.0),
        (Plan(forward=4000, backward=8000, gather=20_000), "exposed_communication", None),
        (Plan(forward=6000, backward=8000), "compute", 32.0),
    ],
)
def test_what_a_step_lost_comes_before_its_kernels(
    tmp_path: Path, slower: Plan, part: str, milliseconds: float | None
) -> None:
    paths: list[Path] = []
    for name, one in (("before", Plan(forward=4000, backward=8000)), ("after", slower)):
        (tmp_path / name).mkdir()
        paths += build(tmp_path / name, one).paths
    found = diff_of(*paths)
    first = found.parts[0]
    assert (first.part, first.changed) == (part, True)
    if milliseconds is not None:
        assert first.delta_ns == pytest.approx(milliseconds * 1e6, rel=0.02)
    # The parts sum to the step, so that nothing it lost is missing.
    for which in ("before_ns", "after_ns"):
        total = sum(getattr(one, which) for one in found.parts)
        step = (found.before if which == "before_ns" else found.after).step_ns
        assert total == pytest.approx(step, rel=0.02)
    assert not any(one.changed for one in diff_of(paths[0], paths[0]).parts)


@pytest.mark.skipif(not TRACES.exists(), reason="needs the traces beside the project")
def test_a_data_bound_pair_is_told_by_its_data(tmp_path: Path) -> None:
    """ResNet-50 with four workers for its data, and with none: kernels changed by 4 ms at most."""
    paths = [TRACES / f"kineto_tb/resnet50_num_workers_{n}.json.gz" for n in (4, 0)]
    found = diff_of(*paths)
    assert found.regressed
    first, second = found.parts[:2]
    assert first.part == "data_loading"
    assert 50e6 < first.delta_ns < 70e6
    assert abs(second.delta_ns) < first.delta_ns / 3
    assert_screen("diff-data", shardwise("trace", str(paths[1]), "--against", str(paths[0])).stdout)


# Without a time in it: workers of a test run must agree on the name of a case.
TRUNCATED = gzip.compress(b'{"traceEvents": [{"ph"' * 99, mtime=0)[:40]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("folder", None, "no .json or .json.gz files"),
        ("cut.json.gz", TRUNCATED, "not a usable trace"),
        ("other.json", b'{"answer": 42}', "no list of trace events"),
    ],
)
def test_a_wrong_input_is_one_sentence_and_exit_2(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    good, bad = trace(tmp_path / "a.json", BASE), tmp_path / name
    bad.mkdir() if content is None else bad.write_bytes(content)
    done = shardwise("trace", str(bad), "--against", str(good))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert str(bad) in line
    assert said in line
