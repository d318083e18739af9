"""Load the newest checkpoint that is whole: verified, or passed over with its reason."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from shardwise.checkpoint.dcp.failure import ignore_single_process_warning, sentence_of
from shardwise.checkpoint.dcp.reader import CheckpointReader
from shardwise.checkpoint.format import index, manifest
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.folder import Folder, is_remote
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.opened import read_saved, read_told
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Saved
from shardwise.checkpoint.format.place import Place, name_of
from shardwise.checkpoint.verify.coverage import problems_of
from shardwise.engine.mesh import world


class Loaded(NamedTuple):
    """What was loaded, and what was passed over on the way to it, each with its reason."""

    manifest: Manifest
    skipped: list[str]


class NothingGoodError(Exception):
    """There are checkpoints, and none of them is whole; says why of each."""


class UnreachableError(Exception):
    """The store does not answer; what is there may be good, so that it may be tried again."""


T = TypeVar("T")
# Given what was saved, the tensors to load into.
Room = Callable[[Manifest, Saved], Mapping[str, torch.Tensor]]


def load_last(place: Place, room: Room) -> Loaded | None:
    """The newest that is whole; None where there is none at all. All ranks call this."""
    skipped: list[str] = []
    for step in reversed(_agreed_steps(place)):
        folder = place.folder(step)
        # The index of a large run is millions of small objects, none of them garbage: collecting
        # amid them takes several times as long as reading them.
        with nothing_collected():
            why, opened = _opened(folder)
            if opened is not None:
                told, saved = opened
                why = _load(folder, saved, room(told, saved))
                if not why:
                    return Loaded(told, skipped)
        skipped.append(f"{name_of(step)}: {why}")
    if skipped:
        raise NothingGoodError("no checkpoint is whole:\n  " + "\n  ".join(skipped))
    return None


@contextmanager
def nothing_collected() -> Iterator[None]:
    """While it lasts, nobody looks for garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def open_checkpoint(folder: Folder) -> tuple[Manifest, Saved]:
    """What a checkpoint says it holds, if it can be true; else UntrustedError, saying why."""
    told = _named(manifest.NAME, lambda: read_told(folder))
    files = {record.name: record for record in told.files}
    saved = _named(index.NAME, lambda: read_saved(folder, told))
    for name, record in files.items():
        try:
            size = folder.size(name)
        except FileNotFoundError:
            raise UntrustedError(f"{name} is missing") from None
        if size != record.bytes:
            raise UntrustedError(f"{name} has {size:,} bytes, saved as {record.bytes:,}")
    for piece in saved.pieces:
        held = files.get(piece.file)
        if held is None or piece.start + piece.length > held.bytes:
            raise UntrustedError(f"{piece.file}: {piece} lies outside of it")
    for tensor, why in problems_of(saved):
        raise UntrustedError(f"{tensor}: {why}")
    return told, saved


def _named(name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except UntrustedError as error:
        raise UntrustedError(f"{name} {error}") from None


def _opened(folder: Folder) -> tuple[str, tuple[Manifest, Saved] | None]:
    """The same on every rank: what one finds wrong is wrong for all."""
    why, unreachable, found = "", "", None
    try:
        found = open_checkpoint(folder)
        rank, size = world()
        heads = [record for record in found[0].files if record.name != index.NAME]
        for record in heads[rank::size]:
            _check_head(folder, record)
    except Exception as error:  # stores have errors of their own kinds
        why = str(error)[:300] or type(error).__name__
        known = isinstance(error, UntrustedError | FileNotFoundError)
        unreachable = why if is_remote(folder.url) and not known else ""
    told = _told_by_all((why, unreachable))
    if lost := next((one for _, one in told if one), ""):
        raise UnreachableError(f"{folder.url}: {lost}")
    why = next((one for one, _ in told if one), "")
    return why, None if why else found


def _check_head(folder: Folder, record: FileRecord) -> None:
    with folder.open(record.name) as file:
        if crc32(file.read(record.head)) != record.crc32:
            raise UntrustedError(f"{record.name}: its header is not what was saved")


def _told_by_all(own: tuple[str, str]) -> list[tuple[str, str]]:
    size = world()[1]
    told = [own] * size
    if size > 1:
        dist.all_gather_object(told, own)
    return told


def _load(folder: Folder, saved: Saved, state: Mapping[str, torch.Tensor]) -> str:
    """Why it failed, the same on every rank; nothing where it did not."""
    alone = not dist.is_initialized()
    ignore_single_process_warning()
    try:
        load(
            dict(state),
            storage_reader=CheckpointReader(folder, saved),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=alone,
        )
    except CheckpointException as error:
        return sentence_of(error)
    return ""


def _agreed_steps(place: Place) -> list[int]:
    """As the first rank sees them."""
    found: list[list[int] | str] = [[]]
    if world()[0] == 0:
        try:
            found = [place.steps()]
        except Exception as error:
            found = [f"{place.url}: {error}"[:300]]
    if world()[1] > 1:
        dist.broadcast_object_list(found)
    if isinstance(found[0], str):
        raise UnreachableError(found[0])
    return found[0]
