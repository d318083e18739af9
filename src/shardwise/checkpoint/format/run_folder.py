"""Where a run keeps its checkpoints."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.format.folder import is_remote
from shardwise.checkpoint.format.place import Place, find_place
from shardwise.spec.lookup import read_toml
from shardwise.spec.record import SpecError

NAME = "checkpoints"


def place_in(folder: Path, to: str | None) -> Place:
    """Of a run with this folder, whose `train.checkpoint.to` is `to`."""
    return find_place(str(folder / NAME) if to is None else f"{to.rstrip('/')}/{folder.name}")


def place_of_run(url: str) -> Place:
    """Of a run that was; or the place itself, if checkpoints lie there."""
    here = find_place(url)
    if here.steps():
        return here
    file = Path(url, "run.toml")
    if is_remote(url) or not file.is_file():
        return find_place(f"{url.rstrip('/')}/{NAME}")
    return place_in(Path(url).resolve(), _told(file))


def _told(file: Path) -> str | None:
    """No more of a run.toml is needed to find its checkpoints, and no more has to be right."""
    try:
        found = read_toml(file, "run").get("train", {}).get("checkpoint", {}).get("to")
    except (SpecError, AttributeError):
        return None
    return found if isinstance(found, str) else None
