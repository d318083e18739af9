"""Files and folders that are on the device, whole, or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"


class SyncedFile:
    """A new file that is on the device when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def __enter__(self) -> SyncedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            os.fsync(self._file.fileno())


def write_synced(path: Path, data: bytes) -> None:
    """Instead of whatever is there."""
    path.unlink(missing_ok=True)
    with SyncedFile(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """A name is on the device when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that becomes `path` at the end, and is gone where anything fails.

    `path` must not be there, or be empty.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    if unfinished.exists():
        # Of an attempt that was killed.
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
