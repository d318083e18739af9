"""Write files and folders durably and atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"


class SyncedFile:
    """A new file that is on disk once it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Write all bytes."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def __enter__(self) -> SyncedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            os.fsync(self._file.fileno())


def write_synced(path: Path, data: bytes) -> None:
    """Write a file durably, replacing any existing one."""
    path.unlink(missing_ok=True)
    with SyncedFile(path) as file:
        file.write(data)


def sync_file(path: Path) -> None:
    """Flush a file that other code wrote to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that the names in it survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `path` at the end, or is removed if anything fails.

    `path` must not exist, or be an empty folder.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    if unfinished.exists():
        # Left by an attempt that was killed.
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    try:
        yield unfinished
        sync_folder(unfinished)
        os.rename(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(path.parent)
