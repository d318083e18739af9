"""Read access to the files of a checkpoint, in a folder or an object store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from shardwise.checkpoint.format.paths import UntrustedError, check_name, inside


class Folder(Protocol):
    """The files of a checkpoint by name. A name outside it, or a link, raises UntrustedError."""

    url: str

    def names(self) -> list[str]:
        """Names of all files, including links and files in subfolders."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file; raises FileNotFoundError."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file to read its bytes; raises FileNotFoundError."""
        ...


def find_folder(url: str) -> Folder:
    """The files at a path or URL."""
    return RemoteFolder(url) if is_remote(url) else LocalFolder(Path(url))


def is_remote(url: str) -> bool:
    """Whether a location is a URL, such as s3://bucket/prefix, and not a local path."""
    return "://" in url


def read_file(folder: Folder, name: str, most: int = 2**33) -> bytes:
    """Read a file; raise UntrustedError if it has more than `most` bytes."""
    if folder.size(name) > most:
        raise UntrustedError(f"{name} is larger than {most:,} bytes")
    with folder.open(name) as file:
        return file.read()


def size_of(folder: Folder) -> int:
    """Total bytes of all files of a folder; unreadable files count as 0."""
    total = 0
    for name in folder.names():
        with contextlib.suppress(OSError, UntrustedError):
            total += folder.size(name)
    return total


class LocalFolder:
    """A folder on a file system.

    With `may_be_link` False, which is for a folder listed in another, it must not be a link.
    """

    def __init__(self, path: Path, *, may_be_link: bool = True) -> None:
        self.path, self.url = path, str(path)
        self._may_be_link = may_be_link

    def names(self) -> list[str]:
        found = (p for p in self.path.rglob("*") if p.is_symlink() or p.is_file())
        return sorted(p.relative_to(self.path).as_posix() for p in found)

    def size(self, name: str) -> int:
        path = self._inside(name)
        if path.is_dir():
            raise FileNotFoundError(name)
        return path.stat().st_size

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._inside(name).open("rb", buffering=0))

    def _inside(self, name: str) -> Path:
        """Path of a file; raises UntrustedError for links and names outside the folder."""
        if not self._may_be_link and self.path.is_symlink():
            raise UntrustedError(f"{self.path.name} is a symbolic link")
        return inside(self.path, name)


class RemoteFolder:
    """A prefix in any store that fsspec supports, such as s3://bucket/prefix."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store, self._prefix = find_store(self.url)

    def names(self) -> list[str]:
        self._store.invalidate_cache()
        found = self._store.find(self._prefix)
        return sorted(path.removeprefix(self._prefix).lstrip("/") for path in found)

    def size(self, name: str) -> int:
        return int(self._store.size(self._path(name)))

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._store.open(self._path(name), "rb"))

    def _path(self, name: str) -> str:
        """Path of a file in the store; raises UntrustedError for names outside the folder."""
        check_name(name)
        return f"{self._prefix}/{name}"


def find_store(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it; SpecError if a package is missing."""
    from shardwise.spec.record import SpecError

    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise SpecError(f"{url}: needs fsspec; install it with 'pip install fsspec'") from None
    try:
        store, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SpecError(f"{url}: {error}") from None
    return store, str(path).rstrip("/")
