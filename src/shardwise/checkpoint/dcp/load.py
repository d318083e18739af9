"""Load the newest intact checkpoint; corrupt ones are skipped with their reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from shardwise.checkpoint.dcp.failure import ignore_single_process_warning, sentence_of
from shardwise.checkpoint.dcp.garbage import no_garbage_collection
from shardwise.checkpoint.dcp.reader import CheckpointReader
from shardwise.checkpoint.format.folder import Folder, is_remote
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.place import Place, name_of
from shardwise.checkpoint.verify.opened import Checkpoint, open_checkpoint
from shardwise.engine.mesh import world
from shardwise.engine.rank_tree import RankTree, shared_tree


class Loaded(NamedTuple):
    """The loaded checkpoint, and the newer ones that were skipped, with reasons."""

    manifest: Manifest
    skipped: list[str]
    skipped_steps: frozenset[int] = frozenset()


class NoIntactCheckpointError(Exception):
    """There are checkpoints, but none is intact; the message says why for each."""


class UnreachableError(Exception):
    """The store does not answer; its checkpoints may be intact, so retry."""


# Returns the tensors to load into.
Allocate = Callable[[Manifest, Mapping[str, Tensor]], Mapping[str, torch.Tensor]]


def load_last(place: Place, allocate: Allocate) -> Loaded | None:
    """Load the newest intact checkpoint; None if there is none at all. All ranks call this."""
    skipped: dict[int, str] = {}
    tree = shared_tree()
    for step in reversed(_agreed_steps(place)):
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
    """Why it is corrupt, or the checkpoint; a problem of one rank counts for all."""
    reason, unreachable, checkpoint = "", "", None
    try:
        checkpoint = open_checkpoint(folder, tree.rank, tree.size)
    except Exception as error:  # stores raise errors of many types
        reason = str(error)[:300] or type(error).__name__
        known = isinstance(error, UntrustedError | FileNotFoundError)
        unreachable = reason if is_remote(folder.url) and not known else ""
    failed = tree.first_failure(reason)
    if failed is None:
        return "", checkpoint
    if lost := tree.first_failure(unreachable):
        raise UnreachableError(f"{folder.url}: {lost.why}")
    return failed.why, None


def _load(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor], tree: RankTree) -> str:
    """Load; return why it failed, the same on every rank, or an empty string."""
    ignore_single_process_warning()
    why = ""
    try:
        # Each rank for itself: it knows which pieces it needs.
        load(
            dict(state),
            storage_reader=CheckpointReader(checkpoint, state),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    except (Exception, CheckpointException) as error:
        why = sentence_of(error)
    failed = tree.first_failure(why)
    return f"rank {failed.rank}: {failed.why}" if failed else ""


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
