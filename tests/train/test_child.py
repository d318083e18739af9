"""Children import nothing from the folder they are started in: not even a file called typer.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.launch.child import start_python
from shardwise.spec.run import write_run
from tests.command import PATIENCE_S, environment
from tests.stacks.runs import tiny

# Imported early and late, by Shardwise, by torch and by the processes that Python itself starts.
NAMES = ("typer", "rich", "pydantic", "json", "torch", "numpy", "typing_extensions", "psutil",
         "multiprocessing", "contextvars", "sched")  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        plant = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + '\\n')\n"
        (tmp_path / f"{name}.py").write_text(plant)
    return tmp_path


def test_a_child_does_not_import_from_its_folder(folder: Path) -> None:
    with start_python("-c", f"import {', '.join(NAMES[:2])}, sched", cwd=folder) as child:
        child.wait(PATIENCE_S)
    assert child.returncode == 0
    assert not (folder / "ran").exists()


def test_no_process_of_a_run_imports_from_its_folder(folder: Path) -> None:
    """Launcher, fork server, ranks, and the analysis of their traces; the user's function does."""
    pytest.importorskip("torch")
    (folder / "own_data.py").write_text(
        "import torch, own_part\ndef batches(rank, world):\n"
        "    import own_later\n    while True:\n        yield torch.zeros(2, 33, dtype=int)\n"
    )
    for part in ("own_part", "own_later"):
        (folder / f"{part}.py").write_text("")
    run = tiny(
        data={"source": "own_data:batches"},
        job={"seq_len": 32, "global_batch": 128},
        train={"steps": 8, "checkpoint": False, "profile": {"after": 3, "steps": 1}},
    )
    (folder / "run.toml").write_text(write_run(run))
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "run.toml", "--nproc", "2"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
