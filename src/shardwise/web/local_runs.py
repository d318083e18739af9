"""Runs and traces of one folder, as the page of a server shows them."""

from __future__ import annotations

import shlex
from pathlib import Path


def runs_in(folder: Path | None) -> list[str]:
    """The names of what a report can be written about, newest first."""
    if folder is None:
        return []
    found = [path for path in folder.iterdir() if _can_report(path)]
    return [path.name for path in sorted(found, key=lambda one: -one.stat().st_mtime)]


def page_of(folder: Path | None, name: str) -> str | None:
    """The report about one of them; None where there is none of that name."""
    from shardwise.report.page.page import write_page
    from shardwise.report.page.read import read_subjects

    if folder is None or name not in runs_in(folder):
        return None
    return write_page(
        read_subjects([folder / name]), shlex.join(["shardwise", "report", str(folder / name)])
    )


def _can_report(path: Path) -> bool:
    """Whether it is a run, a folder of traces, or a trace; links to elsewhere are not followed."""
    if path.is_symlink() or path.name.startswith("."):
        return False
    if path.is_dir():
        return (path / "run.toml").is_file() or any(path.glob("*.json*"))
    return path.name.endswith((".json", ".json.gz", ".toml"))
