"""Find the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.format.folder import is_remote
from shardwise.checkpoint.format.storage import CheckpointStorage, find_storage
from shardwise.spec.read_file import read_toml
from shardwise.spec.record import SpecError

NAME = "checkpoints"


def storage_in(folder: Path, to: str | None) -> CheckpointStorage:
    """The checkpoints of the run in `folder`; `to` is its setting `train.checkpoint.to`."""
    return find_storage(str(folder / NAME) if to is None else f"{to.rstrip('/')}/{folder.name}")


def storage_of_run(url: str) -> CheckpointStorage:
    """The checkpoints of the run at a path or URL, or the checkpoints directly in `url`."""
    here = find_storage(url)
    if here.steps():
        return here
    file = Path(url, "run.toml")
    if is_remote(url) or not file.is_file():
        return find_storage(f"{url.rstrip('/')}/{NAME}")
    return storage_in(Path(url).resolve(), _checkpoint_target(file))


def _checkpoint_target(file: Path) -> str | None:
    """`train.checkpoint.to` of a run.toml, even if the rest of the file is invalid; else None."""
    try:
        target = read_toml(file, "run").get("train", {}).get("checkpoint", {}).get("to")
    except (SpecError, AttributeError):
        return None
    return target if isinstance(target, str) else None
