"""Check the names of files in a checkpoint: nothing outside it is ever opened."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


class UntrustedError(Exception):
    """A checkpoint is corrupt or malicious; the message says how."""


def check_name(name: str) -> PurePosixPath:
    """Return a name as a path; raise UntrustedError if it leads out of its folder."""
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise UntrustedError(f"the name {name[:100]!r} points outside the checkpoint")
    return pure


def inside(folder: Path, name: str) -> Path:
    """The path of a file in `folder`; raises UntrustedError for links and outside names."""
    path = folder
    for part in check_name(name).parts:
        path = path / part
        if path.is_symlink():
            raise UntrustedError(f"{path.relative_to(folder)} is a symbolic link")
    return path
