"""`shardwise trace` as a command: exit codes, JSON, wrong inputs."""

from __future__ import annotations

import gzip
import json
import pickle
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


def test_json_has_a_key_per_cause_and_numbers(trace: Path) -> None:
    done = shardwise("trace", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    first = told["verdicts"][0]
    # 30 of 135 microseconds are an all-gather without compute, in a trace without steps.
    assert (first["cause"], first["operation"]) == ("exposed_communication", "all-gather")
    assert (first["saves_ns"], first["calls"]) == (30_000, 1)
    assert first["share"] == pytest.approx(30 / 135)
    assert set(first["text"]) == {"result", "evidence", "fix"}
    assert (told["profiled_steps"], told["step_ns"]) == (0, 135_000)


def test_a_folder_is_its_traces_and_json_sums(trace: Path) -> None:
    done = shardwise("trace", str(trace.parent), "--json")
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    assert sum(rank[part] for part in parts) == rank["window_ns"] == 135_000
    assert rank["full_trace"]["window_ns"] == 135_000


def test_json_is_per_step(tmp_path: Path) -> None:
    plan = Plan(steps=3, blocks=4)
    build(tmp_path, plan)
    (rank,) = json.loads(shardwise("trace", str(tmp_path), "--json").stdout)["ranks"]
    calls = {one["operation"]: one["calls"] for one in rank["collectives"]}
    # Per step the root is gathered once and four blocks twice; all five are reduced.
    assert calls == {"all-gather": 1 + 2 * 4, "reduce-scatter": 5}
    assert [unit["forward_ns"] for unit in rank["units"]] == [0, *[plan.forward * 1000] * 4]


TRUNCATED = gzip.compress(b'{"traceEvents": [{"ph": "X", "na' * 99, mtime=0)[:40]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.json", None, "does not exist"),
        ("empty", "folder", "no .json or .json.gz files"),
        ("truncated.json.gz", TRUNCATED, "not a usable trace"),
        ("other.json", b'{"answer": 42}', "no list of trace events"),
        ("snapshot.pickle", pickle.dumps([1, 2]), "no list of trace events"),
    ],
)
def test_a_wrong_input_is_one_sentence_and_exit_2(
    tmp_path: Path, name: str, content: bytes | str | None, said: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    done = shardwise("trace", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert str(path) in line
    assert said in line


def test_all_wrong_files_are_named_at_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"rank{number}.json").write_text("{}")
    done = shardwise("trace", str(tmp_path), str(tmp_path / "missing"))
    assert len(done.stderr.strip().splitlines()) == 1  # before anything is read
    done = shardwise("trace", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 3


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
    assert (verdict["cause"], verdict["saves_ns"]) == ("data_loading", 9_000_000)
    assert found[0]["ranks"][1]["idle"]["data_ns"] == 9_000_000
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
    assert "was not profiled" in done.stderr
