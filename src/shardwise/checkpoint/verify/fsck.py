"""Verify a checkpoint's integrity: Shardwise, torch DCP, or Hugging Face safetensors.

Nothing in it is executed and nothing outside it is opened. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.foreign import metadata, safetensors
from shardwise.checkpoint.format import index_v1, layout, manifest
from shardwise.checkpoint.format.folder import Folder, LocalFolder, find_folder, is_remote
from shardwise.checkpoint.format.run_folder import storage_of_run
from shardwise.checkpoint.format.storage import step_of
from shardwise.checkpoint.verify.dcp import check_torch
from shardwise.checkpoint.verify.findings import CheckedCheckpoint, Finding, Kind, Progress
from shardwise.checkpoint.verify.shardwise import check_shardwise
from shardwise.spec.record import SpecError

__all__ = [
    "CheckedCheckpoint",
    "Finding",
    "FoundCheckpoints",
    "find_checkpoints",
    "kind_of",
    "verify_checkpoint",
]


class FoundCheckpoints(NamedTuple):
    """Checkpoints, oldest first, and the names of incomplete ones, which are not verified."""

    folders: list[Folder]
    incomplete: list[str]


def find_checkpoints(url: str) -> FoundCheckpoints:
    """The checkpoint at a path or URL, or all checkpoints of a run; SpecError if there is none."""
    path = Path(url)
    if not is_remote(url):
        if path.is_file() and path.suffix == safetensors.SUFFIX:
            return FoundCheckpoints([safetensors.LinkedFolder(path.parent, path.name)], [])
        if not path.is_dir():
            if not path.exists():
                raise SpecError(f"fsck: {url} does not exist; give a checkpoint or a run folder")
            raise SpecError(f"fsck: {url} is neither a folder nor a .safetensors file")
    folder = find_folder(url)
    if kind_of(folder) is not None:
        return FoundCheckpoints([folder], [])
    place = storage_of_run(url)
    incomplete = [] if is_remote(place.url) else _incomplete(Path(place.url))
    if steps := place.steps():
        return FoundCheckpoints([place.folder(step) for step in steps], incomplete)
    if incomplete:
        raise SpecError(
            f"fsck: {place.url} has no complete checkpoint, only {incomplete[0]}; "
            "give another folder"
        )
    raise SpecError(
        f"fsck: {url} contains no checkpoint; give a folder with {manifest.NAME}, "
        f"{metadata.NAME}, {safetensors.SUFFIX} files or step-… folders"
    )


def kind_of(folder: Folder) -> Kind | None:
    """Format of a checkpoint, by the names of its files; None if it is no checkpoint."""
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
    known = {index_v1.NAME, layout.NAME} & names
    if known or step_of(folder.url.rstrip("/").rpartition("/")[2]) is not None:
        return "shardwise"
    if any(name.endswith((safetensors.SUFFIX, safetensors.INDEX)) for name in names):
        return "safetensors"
    return None


def verify_checkpoint(
    folder: Folder, progress: Progress = lambda _: None, processes: int | None = None
) -> CheckedCheckpoint:
    """Verify every byte that has a checksum; raise SpecError if there is no checkpoint.

    `progress` is called with the bytes read since the last call. At most `processes` read; None:
    one per core.
    """
    kind = kind_of(folder)
    if kind == "shardwise":
        return check_shardwise(folder, progress, processes)
    if kind == "dcp":
        return check_torch(folder, progress, processes)
    if kind == "safetensors":
        if type(folder) is LocalFolder:
            folder = safetensors.LinkedFolder(folder.path)
        return safetensors.check_safetensors(folder)
    raise SpecError(f"fsck: {folder.url} contains no checkpoint")


def _incomplete(path: Path) -> list[str]:
    """Names of folders of steps that were not completed, or were set aside as broken."""
    if not path.is_dir():
        return []
    names = sorted(one.name for one in path.iterdir() if one.is_dir())
    return [name for name in names if step_of(name.partition(".")[0]) is not None and "." in name]
