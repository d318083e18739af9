"""`shardwise trace` as a command: exit codes, JSON, one screen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.test_broken_input import TRACE


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(TRACE))
    return path


def test_the_cause_stands_in_the_first_lines(trace: Path) -> None:
    done = run(str(trace))
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    # 30 of 135 microseconds are an all-gather alone; one call moves what nobody told.
    assert first == "All-gather has no compute to hide behind: 0.030 ms of the trace (22%)."
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_a_folder_is_its_traces_and_json_sums(trace: Path) -> None:
    done = run(str(trace.parent), "--json")
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
        done = run(str(given))
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert said in line
