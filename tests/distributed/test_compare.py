"""Benchmarks of strategies: real runs in rotation, and one that cannot run is a result."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from shardwise.spec.run import read_run
from tests.command import shardwise
from tests.distributed.runs import write

pytest.importorskip("torch")
pytest.importorskip("transformers")


def compare(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return shardwise("compare", str(file), "--nproc", "2", *words, folder=file.parent)


@pytest.mark.nightly
def test_runs_are_taken_in_turns_and_a_broken_one_is_a_result(tmp_path: Path) -> None:
    """Groups of three do not divide two processes."""
    file = write(tmp_path, steps=40)
    words = ["--strategies", "ddp,zero3,zero3:3", "--rounds", "1", "--steps", "8"]
    done = compare(file, *words, "--json")
    assert done.returncode == 0, done.stderr
    scores = {score["name"]: score for score in json.loads(done.stdout)["scores"]}
    assert list(scores)[-1] == "zero3:3"
    assert len(scores["zero3:3"]["failures"]) == 1
    assert scores["zero3:3"]["step_s"] == []
    for name in ("ddp", "zero3"):
        (step_s,) = scores[name]["step_s"]
        tokens = 256  # the global batch of the run
        assert scores[name]["tokens_per_s"] == pytest.approx(tokens / step_s)
        assert scores[name]["peak_bytes"] == pytest.approx(
            scores[name]["predicted_peak_bytes"], rel=0.05
        )
        assert (tmp_path / "runs" / "compare" / name / "runs" / "round-1" / "run.toml").is_file()


MOODY = """
cluster = "1x2xCPU"
model = "tests.distributed.sources:moody_model"
job = { seq_len = 16 }
strategy = { kind = "ddp", micro_batch = 2, param_dtype = "fp32" }
"""


@pytest.mark.nightly
def test_tuning_survives_probes_that_hang_and_die(tmp_path: Path) -> None:
    """Of three batches the largest hangs and the next dies; the last one wins."""
    file = tmp_path / "run.toml"
    file.write_text(MOODY)
    done = shardwise(
        "tune", str(file), "--nproc", "2", "--json", "--strategies", "ddp",
        "--steps", "8", "--timeout", "75", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    failures = {probe["name"]: probe.get("failure", "") for probe in found["probes"]}
    assert "killed" in failures["ddp x8"]
    assert failures["ddp x4"]
    assert found["best"] == "ddp x2"
    assert read_run(tmp_path / "tuned.toml").strategy.micro_batch == 2
    # Nothing of what hung is left.
    assert not [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)]
