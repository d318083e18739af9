"""On CPUs every command has the memory of this machine, whatever asks for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from shardwise.predict.api import estimate_run
from shardwise.spec.quantity import show_gib
from shardwise.spec.run import RunSpec, write_run
from shardwise.step.memory_words import show_memory
from shardwise.trainer.start import for_actual_processes
from shardwise.trials.doctor.plan_checks import check_plan
from tests.command import shardwise
from tests.stacks.runs import tiny


def usable(run: RunSpec) -> int:
    found = estimate_run(run).known_memory.usable_bytes
    assert found is not None
    return found


def test_what_is_usable_is_one_figure(tmp_path: Path) -> None:
    run = tiny(cluster="1x1xCPU", strategy={"kind": "single", "param_dtype": "fp32"})
    planned = run.resolved()
    here = usable(planned)
    assert usable(for_actual_processes(run, torch.device("cpu"))) == here
    assert f", {show_gib(here)} usable" in check_plan(run)[0].detail
    (tmp_path / "run.toml").write_text(write_run(run))
    for words in (["estimate", "run.toml"], ["export", "run.toml", "--to", "slurm"]):
        done = shardwise(*words, folder=tmp_path)
        assert re.search(f"usable (memory +)?{show_memory(here)}", done.stdout + done.stderr)
