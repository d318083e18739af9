"""Load the newest intact checkpoint; corrupt ones are skipped with their reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from shardwise.checkpoint.dcp.failure import (
    cause_of,
    ignore_single_process_warning,
    sentence_of,
)
from shardwise.checkpoint.dcp.garbage import no_garbage_collection
from shardwise.checkpoint.dcp.reader import CheckpointReader, CorruptError
from shardwise.checkpoint.format.broken import UnreadableFileError
from shardwise.checkpoint.format.folder import Folder, is_remote
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.storage import CheckpointStorage, name_of
from shardwise.checkpoint.verify.opened import Checkpoint, open_checkpoint
from shardwise.engine.rank_tree import Failure, RankTree, shared_tree


class Loaded(NamedTuple):
    """The manifest of the loaded checkpoint, and the newer checkpoints that were skipped.

    `skipped` has a sentence with the reason for each.
    """

    manifest: Manifest
    skipped: list[str]
    skipped_steps: frozenset[int] = frozenset()


class NoIntactCheckpointError(Exception):
    """There are checkpoints, but none is intact; the message says why for each."""


class UnreachableError(Exception):
    """A file system or store fails; its checkpoints may be intact, so retry."""


# Returns the tensors to load into, given the manifest and the saved tensors.
Allocate = Callable[[Manifest, Mapping[str, Tensor]], Mapping[str, torch.Tensor]]


def load_last(place: CheckpointStorage, allocate: Allocate) -> Loaded | None:
    """Load the newest intact checkpoint; None if there is no checkpoint. All ranks call this.

    Raises NoIntactCheckpointError if all are corrupt, UnreachableError if storage fails.
    """
    skipped: dict[int, str] = {}
    tree = shared_tree()
    for step in reversed(_agreed_steps(place, tree)):
        folder = place.folder(step)
        # An index is many objects: garbage collection would take longer than reading it.
        with no_garbage_collection():
            reason, checkpoint = _open_on_all_ranks(folder, tree)
            if checkpoint is not None:
                tensors = allocate(checkpoint.manifest, checkpoint.tensors)
                reason = _load(checkpoint, tensors, tree)
                if not reason:
                    return Loaded(checkpoint.manifest, [*skipped.values()], frozenset(skipped))
        skipped[step] = f"{name_of(step)}: {reason}"
    if skipped:
        reasons = "\n  ".join(skipped.values())
        raise NoIntactCheckpointError(f"No intact checkpoint:\n  {reasons}")
    return None


def _open_on_all_ranks(folder: Folder, tree: RankTree) -> tuple[str, Checkpoint | None]:
    """Open a checkpoint: an empty reason and the checkpoint, or the reason why not and None.

    The result is the same on all ranks: a problem of one rank counts for all.
    """
    failure: Exception | None = None
    checkpoint = None
    try:
        checkpoint = open_checkpoint(folder, tree.rank, tree.size)
    except Exception as error:  # stores raise errors of many types
        failure = error
    failed = _first_failure(failure, folder, tree)
    return ("", checkpoint) if failed is None else (failed.why, None)


def _load(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor], tree: RankTree) -> str:
    """Load tensors into `state`; return why that failed, or an empty string.

    The result is the same on all ranks.
    """
    ignore_single_process_warning()
    failure: BaseException | None = None
    try:
        # no_dist: each rank loads alone, since it knows which pieces it needs.
        load(
            dict(state),
            storage_reader=CheckpointReader(checkpoint, state),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    except (Exception, CheckpointException) as error:
        failure = cause_of(error)
    failed = _first_failure(failure, checkpoint.folder, tree)
    return f"rank {failed.rank}: {failed.why}" if failed else ""


def _first_failure(error: BaseException | None, folder: Folder, tree: RankTree) -> Failure | None:
    """The first failure of any rank, the same on all ranks; None if no rank failed.

    `error` is the error of this rank. Raises UnreachableError if retrying may help.
    """
    why = "" if error is None else sentence_of(error)
    failed = tree.first_failure(why)
    if failed is None:
        return None
    may_pass = error is not None and _is_temporary(error, folder)
    if lost := tree.first_failure(why if may_pass else ""):
        raise UnreachableError(f"{folder.url}: rank {lost.rank}: {lost.why}")
    return failed


def _is_temporary(error: BaseException, folder: Folder) -> bool:
    """Whether the file system or the store failed, so that the checkpoint may be intact."""
    if isinstance(error, UnreadableFileError):
        return True
    if isinstance(error, UntrustedError | CorruptError | FileNotFoundError):
        return False
    return isinstance(error, OSError) or is_remote(folder.url)


def _agreed_steps(place: CheckpointStorage, tree: RankTree) -> list[int]:
    """Steps of the complete checkpoints that rank 0 lists, on all ranks; oldest first."""
    steps: list[int] | str = []
    if tree.rank == 0:
        try:
            steps = place.steps()
        except Exception as error:
            steps = f"{place.url}: {error}"[:300]
    steps = tree.json_of(0, steps)
    if isinstance(steps, str):
        raise UnreachableError(steps)
    return steps
