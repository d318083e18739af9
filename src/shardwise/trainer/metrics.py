"""Metrics of a run: always to metrics.jsonl, and to the trackers that are configured."""

from __future__ import annotations

import importlib.util
import json
import math
import uuid
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.launch.best_effort import BestEffort, append_line
from shardwise.pytorch.device import allocator_memory
from shardwise.runs.record import name_of
from shardwise.spec.record import SpecError
from shardwise.spec.train import Tracker as TrackerName
from shardwise.trainer.folder import replace_text


class Tracker(Protocol):
    """Receives the metrics of a step, counted from 1."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TolerantTracker:
    """A tracker whose I/O errors do not stop training; the first one is logged."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker, self._effort = tracker, BestEffort(f"write a log line to {name}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._effort:
            self._tracker.log(step, values)

    def close(self) -> None:
        with self._effort:
            self._tracker.close()


class JsonLines:
    """metrics.jsonl: one JSON object per line, each written completely or not at all.

    `completed` is the number of steps before this process; lines of later steps are removed. A file
    that begins with step 0 was written by version 0.1.0, which counted from 0: it is renumbered.
    """

    def __init__(self, path: Path, completed: int = 0) -> None:
        if path.exists():
            _cut_after_step(path, completed)
        self._file = FileIO(path, "a")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no infinity: values that are not finite are left out.
        kept = {key: value for key, value in values.items() if math.isfinite(value)}
        append_line(self._file, json.dumps({"step": step, **kept}, allow_nan=False))

    def close(self) -> None:
        self._file.close()


def _cut_after_step(path: Path, completed: int) -> None:
    """Remove the lines after step `completed`, to be replayed, and a line that a crash cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            row = json.loads(line)
            rows += [(int(row["step"]), row)] if line.endswith("\n") else []
        except (ValueError, KeyError, TypeError):
            continue
    offset = 1 if any(step == 0 for step, _ in rows) else 0
    kept = [{**row, "step": step + offset} for step, row in rows if step + offset <= completed]
    replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, completed: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then hides the events of steps that are replayed.
        purge = completed + 1 if completed else None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, folder: Path, completed: int = 0) -> None:
        import wandb

        # A resumed run continues under the id of its first start.
        known = folder / "wandb.id"
        if not known.exists():
            known.write_text(uuid.uuid4().hex)
        self._run: Any = wandb.init(
            dir=str(folder), name=name_of(folder), id=known.read_text(), resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow."""

    def __init__(self, folder: Path, completed: int = 0) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.start_run(run_name=name_of(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_TRACKERS: dict[TrackerName, type[TensorBoard] | type[Wandb] | type[Mlflow]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}


def open_trackers(
    names: tuple[TrackerName, ...] | None, folder: Path, completed: int = 0
) -> list[Tracker]:
    """Open metrics.jsonl and the configured trackers for a run that has `completed` steps."""
    lines = folder / "metrics.jsonl"
    trackers: list[Tracker] = [TolerantTracker(JsonLines(lines, completed), str(lines))]
    available = importlib.util.find_spec("tensorboard") is not None
    default: tuple[TrackerName, ...] = ("tensorboard",) if available else ()
    for name in default if names is None else names:
        try:
            trackers.append(TolerantTracker(_TRACKERS[name](folder, completed), name))
        except ModuleNotFoundError as error:
            raise SpecError(
                f"train.trackers: {name} needs the package {error.name}; install it with "
                f"'pip install shardwise[{name}]', or remove it from train.trackers"
            ) from None
    return trackers


def memory_now(device: torch.device) -> dict[str, float]:
    """Memory of this process in bytes, by name: on its GPU if it has one, else resident in RAM."""
    memory = allocator_memory(device)
    if memory is None:
        return resident_memory()
    return {
        "memory_current_bytes": float(memory.allocated),
        "memory_peak_bytes": float(memory.peak_allocated),
        "memory_reserved_bytes": float(memory.reserved),
    }


def resident_memory() -> dict[str, float]:
    """Resident memory of this process in bytes, now and at its peak; empty without /proc."""
    # psutil does not report the peak, and ru_maxrss includes the parent's peak before exec.
    values = {}
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmHWM"):
            name = "resident_bytes" if key == "VmRSS" else "resident_peak_bytes"
            values[name] = float(value.split()[0]) * 1024
    return values
