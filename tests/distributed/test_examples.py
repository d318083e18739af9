"""The examples do what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.command import COMMAND, ROOT
from tests.distributed.launch import output_of

pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.nightly


def test_tiny_learns_shakespeare(tmp_path: Path, shared: Path) -> None:
    """Below 2.0 nats per byte, within five minutes on two processes."""
    words = ("train", str(EXAMPLES / "tiny.toml"), "--nproc", "2", "--json", "--name", "it")
    shown = output_of([*COMMAND, *words], tmp_path, OMP_NUM_THREADS="1")
    result = json.loads(shown)
    assert result["last"]["loss"] < 2.0
    assert result["steps"] == 200
    predicted = result["predicted"]["memory"]["peak_allocated_bytes"]
    assert predicted == pytest.approx(
        result["measured"]["memory"]["peak_allocated_bytes"], rel=0.03
    )


def test_own_loop_runs_alone(tmp_path: Path) -> None:
    script = str(EXAMPLES / "own_loop.py")
    shown = output_of([sys.executable, script], tmp_path, OMP_NUM_THREADS="1")
    assert len([line for line in shown.splitlines() if line.startswith("step")]) == 4
