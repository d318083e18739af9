"""The folder of a run: its configuration, environment, prediction and results."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from shardwise.launch.say import say
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, write_run
from shardwise.spec.version import __version__

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
_SETTINGS = ("OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_NNODES")
# Seconds to wait for a lock that a process of this host holds, or one of another host: NFS keeps
# the locks of a lost host for 90 seconds by default.
_LOCKED_S, _LOCKED_BY_HOST_S = 5.0, 180.0


def make_folder(parent: Path, name: str) -> Path:
    """Create a folder `name` in `parent`, or `name-2` and so on if it exists; return its path."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"too many folders named {name} in {parent}")


def check_name(name: str) -> str:
    """Return `name` if it can name a run's folder; raise SpecError if it is a path."""
    if name in ("", ".", "..") or {"/", "\\"} & set(name) or not name.isprintable():
        raise SpecError(
            f"--name: {name[:60]!r} is not the name of a folder; train.folder says where it lies"
        )
    return name


def lock_folder(folder: Path) -> IO[str]:
    """Lock a folder against other training processes while the returned file is open.

    The kernel releases the lock when the process ends. This takes a moment if the process was just
    killed, and longer on a file server if its host was lost. Raises SpecError if the lock stays
    taken.
    """
    import fcntl

    file = (folder / ".lock").open("a+")
    here, began = platform.node(), time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read(200).strip()
            is_here = not holder or holder.endswith(f" of {here}")
            if time.monotonic() - began > (_LOCKED_S if is_here else _LOCKED_BY_HOST_S):
                break
            time.sleep(0.1)
        except OSError as error:
            say(
                f"{folder} cannot be locked ({error.strerror}): its file system has no locks, so "
                "nothing prevents two runs in it"
            )
            return file
        else:
            # On a full disk, the lock does not name its holder.
            with contextlib.suppress(OSError):
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} of {here}\n".encode())
            return file
    who = holder or "another process"
    raise SpecError(f"{folder}: {who} trains in this folder; wait for it or stop it")


def default_name(run_file: Path) -> str:
    """The default name of a run's folder: the stem of its run.toml and the local time."""
    return f"{run_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_setup(folder: Path, run: RunSpec) -> None:
    """Write run.toml and environment.json into the run's folder."""
    replace_text(folder / "run.toml", write_run(run))
    write_json(folder / "environment.json", environment())


def environment() -> dict[str, Any]:
    """The content of environment.json: versions, host and settings that affect a run."""
    import torch

    from shardwise.pytorch.device import accelerator_names, device_settings

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
    """Versions of Python, Shardwise and the installed libraries that a run uses, by name."""
    installed = {"python": platform.python_version(), "shardwise": __version__}
    for library in _LIBRARIES:
        try:
            installed[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return installed


def folder_of_rank_0(folder: Path) -> Path:
    """The run folder of rank 0, on all ranks, which must all call this.

    Processes that were not launched by rank 0's launcher do not know it.
    """
    from shardwise.engine.rank_tree import shared_tree

    tree = shared_tree()
    path = tree.json_of(0, str(folder.resolve()))
    return folder if tree.rank == 0 else Path(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically: a reader never sees part of it."""
    replace_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically; if that fails, the file stays as it was."""
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
