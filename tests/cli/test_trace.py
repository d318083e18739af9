"""`shardwise trace` as a command: exit codes, JSON, one screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import shardwise
from tests.observe.small import TRACE
from tests.observe.synthetic import Plan, build


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(TRACE))
    return path


def test_the_cause_stands_in_the_first_lines(trace: Path) -> None:
    done = shardwise("trace", str(trace))
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    # 30 of 135 microseconds are an all-gather alone; one call moves what nobody told.
    assert first == "All-gather has no compute to hide behind: 0.030 ms of the trace (22%)."
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_a_folder_is_its_traces_and_json_sums(trace: Path) -> None:
    done = shardwise("trace", str(trace.parent), "--json")
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    assert sum(rank[part] for part in parts) == rank["window_ns"] == 135_000


def test_what_cannot_be_read_is_a_sentence_and_2(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, said in (
        (tmp_path / "missing.json", "cannot read"),
        (tmp_path / "empty", "holds no .json or .json.gz"),
    ):
        done = shardwise("trace", str(given))
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert said in line


@pytest.mark.parametrize(
    ("plan", "first"),
    [
        (Plan(ranks=4, forward=4000, backward=8000), "Healthy: 99.7% of the time computes."),
        (
            Plan(ranks=4, gather=2000, scatter=2200),
            "All-gather has no compute to hide behind: 20.0 ms of each step (26%).",
        ),
        (
            Plan(ranks=8, late={5: ("data", 20_000)}),
            "Rank 5 keeps the others waiting, 20.0 ms of each step (29%).",
        ),
    ],
)
def test_the_cause_comes_first_and_every_line_fits(tmp_path: Path, plan: Plan, first: str) -> None:
    build(tmp_path, plan)
    done = shardwise("trace", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == first
    assert max(map(len, lines)) <= 80


def test_verdicts_thresholds_and_cache_by_command(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    traces = tmp_path / "traces"
    build(traces, Plan(ranks=2, data=9000))
    cache = tmp_path / "cache"
    words = [str(traces), "--json", "--cache", str(cache)]
    found = [json.loads(shardwise("trace", *words).stdout) for _ in range(2)]
    assert found[0] == found[1]
    assert len(list(cache.iterdir())) == 2
    verdict = found[0]["verdicts"][0]
    assert (verdict["cause"], verdict["saves_ns"]) == ("data loader", 9_000_000)
    assert found[0]["ranks"][1]["idle"]["data_ns"] == 3 * 9_000_000
    rules = tmp_path / "rules.toml"
    rules.write_text("[thresholds]\ncompute = 0.5\n")
    assert json.loads(shardwise("trace", *words, "--rules", str(rules)).stdout)["verdicts"] == []
    rules.write_text("[thresholds]\ncompute = 5\nlest = 1\n")
    done = shardwise("trace", *words, "--rules", str(rules))
    assert done.returncode == 2
    assert "rules.thresholds.compute" in done.stderr
    assert "did you mean 'least'" in done.stderr


def test_a_prediction_needs_a_run(trace: Path) -> None:
    done = shardwise("trace", str(trace), "--timeline", "both.json")
    assert done.returncode == 2
    assert "add --run run.toml" in done.stderr


def test_a_run_without_traces_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    done = shardwise("trace", str(tmp_path))
    assert done.returncode == 2
    assert "was not profiled; use 'shardwise profile'" in done.stderr
