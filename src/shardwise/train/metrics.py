"""Numbers of a run as they come: JSON lines always, other trackers behind the same two methods."""

from __future__ import annotations

import importlib.util
import json
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.spec.record import SpecError
from shardwise.spec.train import Tracker as TrackerName


class Tracker(Protocol):
    """Where numbers go."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, each written whole."""

    def __init__(self, path: Path, first: int = 0) -> None:
        if path.exists():
            _forget(path, first)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # JSON knows no infinity: a value that is not finite is absent.
        kept = {key: value for key, value in values.items() if math.isfinite(value)}
        self._file.write(json.dumps({"step": step, **kept}, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _forget(path: Path, first: int) -> None:
    """Lines of steps that will be made again, and the half of one that a crash has left."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and int(json.loads(line)["step"]) < first:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    part = path.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(path)


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Tells TensorBoard to forget what comes again.
        purge = first or None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        import wandb

        # The same run goes on under the name it got when it began.
        known = folder / "wandb.id"
        if not known.exists():
            known.write_text(uuid.uuid4().hex)
        self._run: Any = wandb.init(
            dir=str(folder), name=folder.name, id=known.read_text(), resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.start_run(run_name=folder.name)

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
    names: tuple[TrackerName, ...] | None, folder: Path, first: int = 0
) -> list[Tracker]:
    """JSON lines, and whatever else was asked for, of a run from step `first` on."""
    trackers: list[Tracker] = [JsonLines(folder / "metrics.jsonl", first)]
    available = importlib.util.find_spec("tensorboard") is not None
    default: tuple[TrackerName, ...] = ("tensorboard",) if available else ()
    for name in default if names is None else names:
        try:
            trackers.append(_TRACKERS[name](folder, first))
        except ModuleNotFoundError as error:
            raise SpecError(
                f"train.trackers: {name} needs the package {error.name}; install it with "
                f"'pip install shardwise[{name}]' or leave it out"
            ) from None
    return trackers


def memory_now(device: torch.device) -> dict[str, float]:
    """Memory of this process: of the device where it has one, else resident in RAM."""
    if device.type == "cuda":
        return {
            "memory_current_bytes": float(torch.cuda.memory_allocated()),
            "memory_peak_bytes": float(torch.cuda.max_memory_allocated()),
            "memory_reserved_bytes": float(torch.cuda.memory_reserved()),
        }
    return resident()


def resident() -> dict[str, float]:
    """What the operating system counts as this process's RAM, now and at most."""
    found = {}
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmHWM"):
            name = "resident_bytes" if key == "VmRSS" else "resident_peak_bytes"
            found[name] = float(value.split()[0]) * 1024
    return found
