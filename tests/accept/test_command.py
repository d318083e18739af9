"""`shardwise accept` as a shell starts it: exit codes, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.trials.accept.machine import MAX_BUSY
from tests.command import COMMAND, PATIENCE_S, environment, refusal, shardwise

pytest.importorskip("torch")
pytest.importorskip("transformers")


def verdicts(result: dict[str, Any]) -> dict[str, list[str]]:
    return {one["check"]: [line["verdict"] for line in one["lines"]] for one in result["checks"]}


def test_a_check_that_reaches_its_deadline_fails_and_exits_with_1(tmp_path: Path) -> None:
    done = shardwise(
        "doctor", "--only", "overlap", "--deadline", "1", "--nproc", "2", "--json",
        folder=tmp_path, CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "accept.json").read_text())
    assert not result["passed"]
    assert verdicts(result) == {"overlap": ["failed"]}
    assert "deadline" in result["checks"][0]["lines"][0]["reason"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_ctrl_c_keeps_what_was_seen_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    """As in a terminal, where all processes of the group get the signal."""
    words = ("doctor", "--only", "parity,memory", "--nproc", "2")
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        env=environment(TMPDIR=str(temporary), CUDA_VISIBLE_DEVICES=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "ok: " in line:
            break
    begun = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, printed
    result = json.loads((tmp_path / "accept.json").read_text())
    assert result["stopped_by"] == "SIGINT"
    assert not result["passed"]
    seen = verdicts(result)
    assert set(seen["parity"]) == {"ok"}
    assert seen["memory"] == ["not run"]
    assert "Stopped by SIGINT" in printed
    _, alive = psutil.wait_procs(begun, timeout=PATIENCE_S)
    assert not alive
    assert not list(temporary.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["accept.json"]


def test_unknown_checks_and_files_are_refused_at_once() -> None:
    problems = refusal("doctor", "--only", "parety,memory", "--skip", "nothing")
    assert len(problems) == 2
    assert "parity" in problems[0]
    assert refusal("doctor", "--only", "parity", "--skip", "parity") == [
        "--skip: leaves no check to run"
    ]
    assert refusal("doctor", "-o", "nowhere/accept.json")


# What two processes on CPUs cannot show.
NOT_ON_CPUS = {
    "needs a multiple of 4 devices",
    "only a GPU's allocator reserves memory",
    "only a GPU has streams that overlap",
    "the catalogue has no step times of CPUs",
}


@pytest.mark.timing
def test_a_machine_of_cpus_is_accepted_in_15_minutes(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = shardwise("doctor", "--nproc", "2", "--json", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert time.monotonic() - begin < 15 * 60
    result = json.loads(done.stdout)
    failed = [line for one in result["checks"] for line in one["lines"]
              if line["verdict"] == "failed"]  # fmt: skip
    assert not failed
    assert done.returncode == 0
    reasons = {line["reason"] for one in result["checks"] for line in one["lines"]
               if line["verdict"] == "not run"}  # fmt: skip
    # Nothing else runs beside a test of time; if something does, times are no evidence.
    assert {why for why in reasons if "other processes" not in why} == NOT_ON_CPUS
    for run in result["runs"]:
        assert run["measured"]["provenance"]["kind"] == "measured"
        assert "step_s" in run["calibrated"]["time"]
        assert ("contribution" in run) == (run["busy_share"] <= MAX_BUSY)
