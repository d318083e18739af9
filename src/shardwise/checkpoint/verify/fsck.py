"""Whether a checkpoint is whole and is what was saved: ours, torch's own, or Hugging Face's.

Nothing in it is run, nothing outside of it is opened, and only what has a checksum is called
intact. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.foreign import metadata, safetensors
from shardwise.checkpoint.format import index, manifest
from shardwise.checkpoint.format.folder import Folder, LocalFolder, find_folder, is_remote
from shardwise.checkpoint.format.place import step_of
from shardwise.checkpoint.format.run_folder import place_of_run
from shardwise.checkpoint.verify.dcp import check_torch
from shardwise.checkpoint.verify.findings import Checked, Finding, Kind, Progress
from shardwise.checkpoint.verify.ours import check_ours
from shardwise.spec.record import SpecError

__all__ = ["Checked", "Finding", "Found", "check", "find_checkpoints", "kind_of"]


class Found(NamedTuple):
    """Checkpoints, the oldest first, and what lies beside them that is none."""

    folders: list[Folder]
    beside: list[str]


def find_checkpoints(url: str) -> Found:
    """The checkpoint at a path or URL, or all those of a run; raises SpecError if there is none."""
    path = Path(url)
    if not is_remote(url):
        if path.is_file() and path.suffix == safetensors.SUFFIX:
            return Found([safetensors.LinkedFolder(path.parent, path.name)], [])
        if not path.is_dir():
            what = "is no folder and no .safetensors file" if path.exists() else "is not there"
            raise SpecError(f"fsck: {url} {what}")
    folder = find_folder(url)
    if kind_of(folder) is not None:
        return Found([folder], [])
    place = place_of_run(url)
    beside = [] if is_remote(place.url) else _beside(Path(place.url))
    if steps := place.steps():
        return Found([place.folder(step) for step in steps], beside)
    if beside:
        raise SpecError(f"fsck: {place.url} holds no finished checkpoint, only {beside[0]}")
    raise SpecError(
        f"fsck: {url} holds no checkpoint: no {manifest.NAME}, no {metadata.NAME}, no "
        f"{safetensors.SUFFIX} file and no step-… folder"
    )


def kind_of(folder: Folder) -> Kind | None:
    """By the files in it; one of ours is known by its name even without a manifest."""
    if isinstance(folder, safetensors.LinkedFolder):
        return "safetensors"
    if isinstance(folder, LocalFolder):
        names = {path.name for path in folder.path.iterdir()}
    else:
        names = {name for name in folder.names() if "/" not in name}
    if manifest.NAME in names:
        return "shardwise"
    if metadata.NAME in names:
        return "dcp"
    if index.NAME in names or step_of(folder.url.rstrip("/").rpartition("/")[2]) is not None:
        return "shardwise"
    if any(name.endswith((safetensors.SUFFIX, safetensors.INDEX)) for name in names):
        return "safetensors"
    return None


def check(
    folder: Folder, progress: Progress = lambda _: None, processes: int | None = None
) -> Checked:
    """Read all of it that has a checksum, once. Raises SpecError where there is no checkpoint."""
    kind = kind_of(folder)
    if kind == "shardwise":
        return check_ours(folder, progress, processes)
    if kind == "dcp":
        return check_torch(folder, progress, processes)
    if kind == "safetensors":
        if type(folder) is LocalFolder:
            folder = safetensors.LinkedFolder(folder.path)
        return safetensors.check_safetensors(folder)
    raise SpecError(f"fsck: {folder.url} holds no checkpoint")


def _beside(path: Path) -> list[str]:
    """Folders of a step that were not finished, or were set aside."""
    if not path.is_dir():
        return []
    names = sorted(one.name for one in path.iterdir() if one.is_dir())
    return [name for name in names if step_of(name.partition(".")[0]) is not None and "." in name]
