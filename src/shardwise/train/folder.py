"""The folder of a run: its configuration, environment, prediction and results."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, write_run
from shardwise.version import __version__

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
_SETTINGS = ("OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_NNODES")


def make_folder(parent: Path, name: str) -> Path:
    """Create a folder `name`, or `name-2` and so on if it exists."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"too many folders named {name} in {parent}")


def lock_folder(folder: Path) -> IO[str]:
    """Lock a folder against other training processes while the returned file is open.

    The kernel releases the lock when the process ends.
    """
    import fcntl

    file = (folder / ".lock").open("w")
    for _ in range(50):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A process that was just killed may not have ended yet.
            time.sleep(0.1)
        else:
            return file
    raise SpecError(f"{folder}: another process trains in this folder; wait for it or stop it")


def default_name(run_file: Path) -> str:
    return f"{run_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_setup(folder: Path, run: RunSpec) -> None:
    (folder / "run.toml").write_text(write_run(run))
    write_json(folder / "environment.json", environment())


def environment() -> dict[str, Any]:
    """Versions and settings that affect a run."""
    import torch

    from shardwise.engine.device import accelerator_names, device_settings

    kept = {key: os.environ[key] for key in _SETTINGS if key in os.environ} | device_settings()
    return {
        "versions": versions(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": accelerator_names(),
        "settings": dict(sorted(kept.items())),
    }


def versions() -> dict[str, str]:
    """Versions of Python, Shardwise and the libraries a run uses."""
    installed = {"python": platform.python_version(), "shardwise": __version__}
    for library in _LIBRARIES:
        try:
            installed[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return installed


def folder_of_rank_0(folder: Path) -> Path:
    """The run folder of rank 0; processes that joined by themselves do not know it."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return folder
    path = [str(folder.resolve())]
    dist.broadcast_object_list(path)
    return folder if dist.get_rank() == 0 else Path(path[0])


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically: a reader never sees part of it."""
    text = json.dumps(value, indent=2, allow_nan=False)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text + "\n")
    unfinished.replace(path)
