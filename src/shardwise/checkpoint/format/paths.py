"""Names of files inside a checkpoint: nothing outside of it is ever opened."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


class UntrustedError(Exception):
    """A checkpoint asks for something that only a broken or a hostile one would; says what."""


def check_name(name: str) -> PurePosixPath:
    """Refuse whatever could lead out of the folder it is looked for in."""
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise UntrustedError(f"the name {name[:100]!r} leads out of the checkpoint")
    return pure


def inside(folder: Path, name: str) -> Path:
    """The file of this name in `folder`; refuses whatever leads out of it, links too."""
    path = folder
    for part in check_name(name).parts:
        path = path / part
        if path.is_symlink():
            raise UntrustedError(f"{path.relative_to(folder)} is a symbolic link")
    return path
