"""Runs and traces in one folder, for the page of a server."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from shardwise.spec.foreign_text import visible


def runs_in(folder: Path | None) -> list[str]:
    """Names of runs and traces in `folder` that a report can read, newest first; empty for None."""
    if folder is None:
        return []
    times = {path.name: _time(path) for path in folder.iterdir() if _can_report(path, folder)}
    return sorted(times, key=times.__getitem__, reverse=True)


def page_of(folder: Path | None, name: str) -> str | None:
    """The HTML report about a run or trace in `folder`; None if it is not one of `runs_in`.

    Also None if a symbolic link in it leads out of `folder`.
    """
    from shardwise.report.page.page import write_page
    from shardwise.report.page.read import read_subjects

    if folder is None or name not in runs_in(folder):
        return None
    path = folder / name
    inside = (Path(at) / entry for at, folders, files in os.walk(path) for entry in folders + files)
    if any(_links_outside(entry, folder) for entry in inside):
        return None
    return write_page(read_subjects([path]), shlex.join(["shardwise", "report", str(path)]))


def _can_report(path: Path, folder: Path) -> bool:
    """Whether a path is a run, a folder of traces, or a trace, and not a symbolic link."""
    # A name with hidden characters could look like another name.
    if path.is_symlink() or path.name.startswith(".") or visible(path.name) != path.name:
        return False
    try:
        if path.is_dir():
            known = [path / "run.toml", *path.glob("*.json*")]
            return any(one.is_file() and not _links_outside(one, folder) for one in known)
    except OSError:  # not allowed to read it
        return False
    return path.name.endswith((".json", ".json.gz", ".toml"))


def _links_outside(path: Path, folder: Path) -> bool:
    """Whether a path is a symbolic link to outside `folder`."""
    return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())


def _time(path: Path) -> float:
    """Time of the last modification in seconds; 0 if the path is gone."""
    try:
        return path.stat().st_mtime
    except OSError:  # removed since
        return 0.0
