"""The folder of a run: what was asked for, where it ran, what was predicted and what came out."""

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
_SETTINGS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "SLURM_JOB_ID", "SLURM_NNODES")


def make_folder(parent: Path, name: str) -> Path:
    """A new folder: `name`, or `name-2` and so on where that is taken."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"too many folders called {name} in {parent}")


def lock_folder(folder: Path) -> IO[str]:
    """Keep others from training in a folder, for as long as what is returned is open.

    A process that dies, however it dies, lets go.
    """
    import fcntl

    file = (folder / ".lock").open("w")
    for _ in range(50):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # One that was killed a moment ago may not be gone yet.
            time.sleep(0.1)
        else:
            return file
    raise SpecError(f"{folder}: another process is training there; wait for it, or stop it")


def default_name(run_file: Path) -> str:
    return f"{run_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_setup(folder: Path, run: RunSpec) -> None:
    (folder / "run.toml").write_text(write_run(run))
    write_json(folder / "environment.json", environment())


def environment() -> dict[str, Any]:
    """Versions and settings that decide how a run behaves."""
    import torch

    kept = {k: v for k, v in os.environ.items() if k in _SETTINGS or k.startswith(_PREFIXES)}
    return {
        "versions": versions(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "settings": dict(sorted(kept.items())),
    }


def versions() -> dict[str, str]:
    """Of what a run is made with."""
    found = {"python": platform.python_version(), "shardwise": __version__}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def folder_of_rank_0(folder: Path) -> Path:
    """Processes that joined by themselves do not know the folder of the run, nor where it lies."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return folder
    told = [str(folder.resolve())]
    dist.broadcast_object_list(told)
    return folder if dist.get_rank() == 0 else Path(told[0])


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all: a reader never sees half a file."""
    text = json.dumps(value, indent=2, allow_nan=False)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text + "\n")
    unfinished.replace(path)
