"""Load the newest intact checkpoint; corrupt ones are skipped with their reason."""

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
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Saved
from shardwise.checkpoint.format.place import Place, name_of
from shardwise.checkpoint.format.read_checkpoint import read_index, read_manifest
from shardwise.checkpoint.verify.coverage import problems_of
from shardwise.engine.mesh import world


class Loaded(NamedTuple):
    """The loaded checkpoint, and the newer ones that were skipped, with reasons."""

    manifest: Manifest
    skipped: list[str]


class NoIntactCheckpointError(Exception):
    """There are checkpoints, but none is intact; the message says why for each."""


class UnreachableError(Exception):
    """The store does not answer; its checkpoints may be intact, so retry."""


T = TypeVar("T")
# Returns the tensors to load into.
Allocate = Callable[[Manifest, Saved], Mapping[str, torch.Tensor]]


def load_last(place: Place, allocate: Allocate) -> Loaded | None:
    """Load the newest intact checkpoint; None if there is none at all. All ranks call this."""
    skipped: list[str] = []
    for step in reversed(_agreed_steps(place)):
        folder = place.folder(step)
        # The index of a large run is millions of objects: garbage collection would take several
        # times as long as reading it.
        with no_garbage_collection():
            reason, opened = _open_on_all_ranks(folder)
            if opened is not None:
                parsed, saved = opened
                reason = _load(folder, saved, allocate(parsed, saved))
                if not reason:
                    return Loaded(parsed, skipped)
        skipped.append(f"{name_of(step)}: {reason}")
    if skipped:
        raise NoIntactCheckpointError("No intact checkpoint:\n  " + "\n  ".join(skipped))
    return None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the body."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def open_checkpoint(folder: Folder) -> tuple[Manifest, Saved]:
    """The manifest and index of a checkpoint; raises UntrustedError if they are inconsistent."""
    parsed = _named(manifest.NAME, lambda: read_manifest(folder))
    files = {record.name: record for record in parsed.files}
    saved = _named(index.NAME, lambda: read_index(folder, parsed))
    for name, record in files.items():
        try:
            size = folder.size(name)
        except FileNotFoundError:
            raise UntrustedError(f"{name} is missing") from None
        if size != record.bytes:
            raise UntrustedError(f"{name} has {size:,} bytes, expected {record.bytes:,}")
    for piece in saved.pieces:
        held = files.get(piece.file)
        if held is None or piece.start + piece.length > held.bytes:
            raise UntrustedError(f"{piece.file}: {piece} exceeds the file")
    for tensor, problem in problems_of(saved):
        raise UntrustedError(f"{tensor}: {problem}")
    return parsed, saved


def _named(name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except UntrustedError as error:
        raise UntrustedError(f"{name} {error}") from None


def _open_on_all_ranks(folder: Folder) -> tuple[str, tuple[Manifest, Saved] | None]:
    """Why it is corrupt, or its content; a problem of one rank counts for all."""
    reason, unreachable, opened = "", "", None
    try:
        opened = open_checkpoint(folder)
        rank, size = world()
        heads = [record for record in opened[0].files if record.name != index.NAME]
        for record in heads[rank::size]:
            _check_head(folder, record)
    except Exception as error:  # stores raise errors of many types
        reason = str(error)[:300] or type(error).__name__
        known = isinstance(error, UntrustedError | FileNotFoundError)
        unreachable = reason if is_remote(folder.url) and not known else ""
    gathered = _gather((reason, unreachable))
    if lost := next((one for _, one in gathered if one), ""):
        raise UnreachableError(f"{folder.url}: {lost}")
    reason = next((one for one, _ in gathered if one), "")
    return reason, None if reason else opened


def _check_head(folder: Folder, record: FileRecord) -> None:
    with folder.open(record.name) as file:
        if crc32(file.read(record.head)) != record.crc32:
            raise UntrustedError(f"{record.name}: its header does not match its checksum")


def _gather(own: tuple[str, str]) -> list[tuple[str, str]]:
    size = world()[1]
    gathered = [own] * size
    if size > 1:
        dist.all_gather_object(gathered, own)
    return gathered


def _load(folder: Folder, saved: Saved, state: Mapping[str, torch.Tensor]) -> str:
    """Load; return why it failed, the same on every rank, or an empty string."""
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
    """The steps of complete checkpoints, as rank 0 sees them."""
    steps: list[list[int] | str] = [[]]
    if world()[0] == 0:
        try:
            steps = [place.steps()]
        except Exception as error:
            steps = [f"{place.url}: {error}"[:300]]
    if world()[1] > 1:
        dist.broadcast_object_list(steps)
    if isinstance(steps[0], str):
        raise UnreachableError(steps[0])
    return steps[0]
