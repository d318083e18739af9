"""Where the checkpoints of a run lie, and how one becomes a checkpoint: whole, or not at all.

A folder is written under another name and then renamed. An object store has no rename, but takes
an object whole or not at all: there a checkpoint is one as soon as its manifest is there.
"""

from __future__ import annotations

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

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_BROKEN = ".broken"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint that was finished; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class Place(Protocol):
    """Checkpoints by their step."""

    url: str

    def steps(self) -> list[int]:
        """Those that were finished, the oldest first."""
        ...

    def folder(self, step: int) -> Folder: ...

    def begin(self, step: int) -> None:
        """Make room for a new one; nothing of an earlier attempt is left there."""
        ...

    def create(self, step: int, name: str) -> BinaryIO:
        """A file of one that was begun. It is safe when it is closed."""
        ...

    def verify_from(self, step: int, name: str) -> BinaryIO | None:
        """The file just closed, to be read back from where it lies; None where stores do that."""
        ...

    def commit(self, step: int, told: bytes) -> None:
        """Finish it, with its manifest. From here on it survives a crash, and is the latest."""
        ...

    def remove(self, step: int) -> None: ...


def find_place(url: str) -> Place:
    return RemotePlace(url) if is_remote(url) else LocalPlace(Path(url))


class LocalPlace:
    """A folder of folders."""

    def __init__(self, path: Path) -> None:
        self.url, self._path = str(path), path

    def steps(self) -> list[int]:
        if not self._path.is_dir():
            return []
        found = (step_of(path.name) for path in self._path.iterdir() if path.is_dir())
        return sorted(step for step in found if step is not None)

    def folder(self, step: int) -> Folder:
        return LocalFolder(self._path / name_of(step))

    def begin(self, step: int) -> None:
        if self._path.is_dir():
            # Only one save is under way at a time: what is unfinished is of one that died.
            for path in self._path.glob(f"*{UNFINISHED}"):
                shutil.rmtree(path)
        self._unfinished(step).mkdir(parents=True)

    def create(self, step: int, name: str) -> BinaryIO:
        return cast(BinaryIO, SyncedFile(self._unfinished(step) / name))

    def verify_from(self, step: int, name: str) -> BinaryIO | None:
        file = (self._unfinished(step) / name).open("rb", buffering=0)
        if hasattr(os, "posix_fadvise"):
            # From the device, not from the memory it was just written from.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return cast(BinaryIO, file)

    def commit(self, step: int, told: bytes) -> None:
        folder = self._unfinished(step)
        write_synced(folder / manifest.NAME, told)
        sync_folder(folder)
        if (self._path / name_of(step)).exists():
            # Nobody saves a step again unless the one that is there could not be loaded.
            self._set_aside(step)
        os.rename(folder, self._path / name_of(step))
        sync_folder(self._path)
        part = self._path / f"{LATEST}.part"
        write_synced(part, f"{name_of(step)}\n".encode())
        part.replace(self._path / LATEST)

    def remove(self, step: int) -> None:
        """Renamed first, so that half of it is never taken for a checkpoint."""
        path = self._path / name_of(step)
        gone = self._path / f"{path.name}{UNFINISHED}"
        os.rename(path, gone)
        shutil.rmtree(gone)

    def _set_aside(self, step: int) -> None:
        number = 1
        while (aside := self._path / f"{name_of(step)}{_BROKEN}-{number}").exists():
            number += 1
        os.rename(self._path / name_of(step), aside)

    def _unfinished(self, step: int) -> Path:
        return self._path / f"{name_of(step)}{UNFINISHED}"


class RemotePlace:
    """A prefix of prefixes in any store that fsspec knows."""

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
        for path in self._listed():
            name = path.rstrip("/").split("/")[-1]
            if _STEP.fullmatch(name) and name not in finished:
                self._remove(name)

    def create(self, step: int, name: str) -> BinaryIO:
        return cast(BinaryIO, self._store.open(f"{self._prefix}/{name_of(step)}/{name}", "wb"))

    def verify_from(self, step: int, name: str) -> BinaryIO | None:
        return None

    def commit(self, step: int, told: bytes) -> None:
        self._store.pipe_file(f"{self._prefix}/{name_of(step)}/{manifest.NAME}", told)
        self._store.pipe_file(f"{self._prefix}/{LATEST}", f"{name_of(step)}\n".encode())
        self._store.invalidate_cache()

    def remove(self, step: int) -> None:
        self._remove(name_of(step))

    def _listed(self) -> list[str]:
        if not self._store.exists(self._prefix):
            return []
        return [str(path) for path in self._store.ls(self._prefix, detail=False)]

    def _remove(self, name: str) -> None:
        """The manifest goes first: without it the rest is nothing."""
        path = f"{self._prefix}/{name}"
        self._store.invalidate_cache()
        if self._store.exists(f"{path}/{manifest.NAME}"):
            self._store.rm(f"{path}/{manifest.NAME}")
        if self._store.exists(path):
            self._store.rm(path, recursive=True)
