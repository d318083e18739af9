"""Where the checkpoints of a run are stored, and how each is committed atomically.

A local checkpoint is written under another name and then renamed. An object store cannot rename,
but writes objects atomically: there a checkpoint is complete once it has a manifest.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.folder import (
    Folder,
    LocalFolder,
    RemoteFolder,
    find_store,
    is_remote,
)
from shardwise.checkpoint.format.synced import UNFINISHED, SyncedFile, sync_folder, write_synced

log = logging.getLogger("shardwise")

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_BROKEN = ".broken"


def name_of(step: int) -> str:
    """Folder name of the checkpoint of a step: `step-00000020`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a complete checkpoint by its folder name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class CheckpointStorage(Protocol):
    """The checkpoints of a run, by step, in a folder or an object store."""

    url: str

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first."""
        ...

    def folder(self, step: int) -> Folder:
        """The files of the checkpoint of a step."""
        ...

    def begin(self, step: int) -> None:
        """Start a checkpoint; remove the files of unfinished attempts."""
        ...

    def create(self, step: int, name: str) -> BinaryIO:
        """Create a file of a started checkpoint; it is stored durably once it is closed."""
        ...

    def verify_from(self, step: int, name: str) -> BinaryIO | None:
        """Open a closed file to read it back from disk.

        None if the store verifies its files itself.
        """
        ...

    def commit(self, step: int, data: bytes) -> None:
        """Complete a checkpoint with the manifest `data`.

        It then survives a crash and is the latest.
        """
        ...

    def discard(self, step: int) -> None:
        """Remove a checkpoint that was started and not completed."""
        ...

    def remove(self, step: int) -> None:
        """Delete a complete checkpoint."""
        ...


def find_storage(url: str) -> CheckpointStorage:
    """The checkpoints in a local folder or under the URL of an object store."""
    return RemoteStorage(url) if is_remote(url) else LocalStorage(Path(url))


class LocalStorage:
    """Checkpoints in a local folder, one folder per step."""

    def __init__(self, path: Path) -> None:
        self.url, self._path = str(path), path

    def steps(self) -> list[int]:
        try:
            with os.scandir(self._path) as entries:
                found = [step_of(entry.name) for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            # Any other error is raised: without steps, a run would start anew.
            return []
        return sorted(step for step in found if step is not None)

    def folder(self, step: int) -> Folder:
        return LocalFolder(self._path / name_of(step), may_be_link=False)

    def begin(self, step: int) -> None:
        if self._path.is_dir():
            # Only one save runs at a time: unfinished folders are from a process that died.
            for path in self._path.glob(f"*{UNFINISHED}"):
                _delete(path)
        self._unfinished(step).mkdir(parents=True)

    def create(self, step: int, name: str) -> BinaryIO:
        return cast(BinaryIO, SyncedFile(self._unfinished(step) / name))

    def verify_from(self, step: int, name: str) -> BinaryIO | None:
        file = (self._unfinished(step) / name).open("rb", buffering=0)
        if hasattr(os, "posix_fadvise"):
            # Read from the disk, not from the page cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return cast(BinaryIO, file)

    def commit(self, step: int, data: bytes) -> None:
        folder = self._unfinished(step)
        write_synced(folder / manifest.NAME, data)
        sync_folder(folder)
        if (self._path / name_of(step)).exists():
            # A step is saved again only if the existing checkpoint could not be loaded.
            self._set_aside(step)
        os.rename(folder, self._path / name_of(step))
        sync_folder(self._path)
        self._write_latest(step)

    def _write_latest(self, step: int) -> None:
        """Write the name of the newest checkpoint to `latest`, for people and other tools.

        The checkpoint is complete without that: if it fails, a warning is logged.
        """
        part = self._path / f"{LATEST}.part"
        try:
            write_synced(part, f"{name_of(step)}\n".encode())
            part.replace(self._path / LATEST)
        except OSError as error:
            _warn_of_pointer(self.url, step, error)

    def discard(self, step: int) -> None:
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Delete a checkpoint; rename it first, so that a partly deleted one is never loaded."""
        path = self._path / name_of(step)
        gone = self._path / f"{path.name}{UNFINISHED}"
        os.rename(path, gone)
        _delete(gone)

    def _set_aside(self, step: int) -> None:
        """Rename a checkpoint that could not be loaded, so that its name is free."""
        number = 1
        while (aside := self._path / f"{name_of(step)}{_BROKEN}-{number}").exists():
            number += 1
        os.rename(self._path / name_of(step), aside)

    def _unfinished(self, step: int) -> Path:
        """Folder of a checkpoint until it is complete."""
        return self._path / f"{name_of(step)}{UNFINISHED}"


def _warn_of_pointer(url: str, step: int, error: Exception) -> None:
    """Log that a checkpoint is complete, but `latest` could not be written."""
    why = getattr(error, "strerror", None) or error
    log.warning("%s is complete, but %s/%s: %s", name_of(step), url, LATEST, why)


def _delete(path: Path) -> None:
    """Delete a folder; of a link, delete only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


class RemoteStorage:
    """Checkpoints under a prefix of any store that fsspec supports."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store, self._prefix = find_store(self.url)

    def steps(self) -> list[int]:
        self._store.invalidate_cache()
        found = self._store.glob(f"{self._prefix}/step-*/{manifest.NAME}")
        steps = (step_of(path.split("/")[-2]) for path in found)
        return sorted(step for step in steps if step is not None)

    def folder(self, step: int) -> Folder:
        return RemoteFolder(f"{self.url}/{name_of(step)}")

    def begin(self, step: int) -> None:
        self._store.invalidate_cache()
        finished = {name_of(step) for step in self.steps()} - {name_of(step)}
        for path in self._list_paths():
            name = path.rstrip("/").split("/")[-1]
            if _STEP.fullmatch(name) and name not in finished:
                self._remove(name)

    def create(self, step: int, name: str) -> BinaryIO:
        return cast(BinaryIO, self._store.open(f"{self._prefix}/{name_of(step)}/{name}", "wb"))

    def verify_from(self, step: int, name: str) -> BinaryIO | None:
        return None

    def commit(self, step: int, data: bytes) -> None:
        self._store.pipe_file(f"{self._prefix}/{name_of(step)}/{manifest.NAME}", data)
        self._write_latest(step)
        self._store.invalidate_cache()

    def _write_latest(self, step: int) -> None:
        """Write the name of the newest checkpoint to `latest`, for people and other tools.

        The checkpoint is complete without that: if it fails, a warning is logged.
        """
        try:
            self._store.pipe_file(f"{self._prefix}/{LATEST}", f"{name_of(step)}\n".encode())
        except Exception as error:  # each store has errors of its own
            _warn_of_pointer(self.url, step, error)

    def discard(self, step: int) -> None:
        """Remove the files of an unfinished checkpoint; a complete one stays."""
        if step not in self.steps():
            self._remove(name_of(step))

    def remove(self, step: int) -> None:
        self._remove(name_of(step))

    def _list_paths(self) -> list[str]:
        """Paths directly under the prefix; empty if there is nothing."""
        if not self._store.exists(self._prefix):
            return []
        return [str(path) for path in self._store.ls(self._prefix, detail=False)]

    def _remove(self, name: str) -> None:
        """Delete a checkpoint, and its manifest first: without it there is no checkpoint."""
        path = f"{self._prefix}/{name}"
        self._store.invalidate_cache()
        if self._store.exists(f"{path}/{manifest.NAME}"):
            self._store.rm(f"{path}/{manifest.NAME}")
        if self._store.exists(path):
            self._store.rm(path, recursive=True)
