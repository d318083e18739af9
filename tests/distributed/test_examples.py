"""The examples do what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT
from tests.distributed.test_train import environment

pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tiny_learns_shakespeare(tmp_path: Path, shared: Path) -> None:
    """Below 2.0 nats per byte, within five minutes on two processes."""
    command = ("-m", "shardwise", "train", str(EXAMPLES / "tiny.toml"), "--nproc", "2", "--json")
    result = json.loads(run(tmp_path, *command, "--name", "it"))
    assert result["last"]["loss"] < 2.0
    assert result["steps"] == 200
    predicted = result["predicted"]["memory"]["peak_allocated_bytes"]
    assert predicted == pytest.approx(
        result["measured"]["memory"]["peak_allocated_bytes"], rel=0.03
    )


def test_own_loop_alone_and_on_two_processes(tmp_path: Path) -> None:
    alone = run(tmp_path, str(EXAMPLES / "own_loop.py"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    together = run(tmp_path, *launcher, str(EXAMPLES / "own_loop.py"))
    for shown in (alone, together):
        lines = [line.split() for line in shown.splitlines() if line.startswith("step")]
        losses = [float(words[-1]) for words in lines]
        assert len(losses) == 4
        assert losses[-1] < 0.1 < losses[0]
