"""Train a run.toml on the ranks of `Workers`, as `shardwise train` does on ranks of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run
from shardwise.trainer import save_pace
from shardwise.trainer.run import run_training


def run_toml(case: dict[str, Any]) -> dict[str, Any]:
    """Train `case["file"]` into the folder runs/it beside it; how that ended on this rank."""
    file = Path(case["file"])
    folder = file.parent / "runs" / "it"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # The cache of tokens lies in the folder a run is started from.
        with contextlib.chdir(file.parent):
            result = run_training(read_run(file), folder)
    except SpecError as error:
        return {"refused": str(error)}
    predicts = result.predicted is not None
    return {"reason": result.reason, "steps": result.steps, "predicts": predicts}


def run_saving_at_once(case: dict[str, Any]) -> dict[str, Any]:
    """The same, where early saves begin with the run instead of seconds later."""
    with mock.patch.object(save_pace, "FIRST_S", 0.0):
        return run_toml(case)
