"""The checkpoint of a run with the lowest held-out loss, as the manifests say."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

from shardwise.checkpoint.format.broken import BrokenFileError
from shardwise.checkpoint.format.read_checkpoint import read_manifest
from shardwise.checkpoint.format.storage import CheckpointStorage
from shardwise.engine.rank_tree import shared_tree


class Best(NamedTuple):
    """A step and its held-out loss."""

    step: int
    loss: float


def best_of(place: CheckpointStorage, last: int, run: Mapping[str, Any]) -> Best | None:
    """The checkpoint up to step `last` with the lowest held-out loss; None if none has one.

    All ranks call this; rank 0 reads. Losses of other held-out data than those of `run`, the
    sections of the run, do not count.
    """
    tree, found = shared_tree(), None
    if tree.rank == 0:
        # Without it, the next evaluation is the best: an object store raises errors of its own.
        with suppress(Exception):
            found = min(_found(place, last, run), key=lambda best: best.loss, default=None)
    told = tree.json_of(0, found)
    return None if told is None else Best(*told)


def held_out_set(run: Mapping[str, Any]) -> tuple[object, ...]:
    """What a run's held-out loss is computed on, by the sections of the run."""
    settings = run.get("eval", {})
    data = settings.get("data", {})
    # Files may have moved since the checkpoint.
    names = tuple(PurePath(path).name for path in data.get("path", ()))
    tokens = settings.get("tokens")
    return names, data.get("source"), data.get("format"), data.get("loss_on"), tokens


def _found(place: CheckpointStorage, last: int, run: Mapping[str, Any]) -> list[Best]:
    """Step and loss of each checkpoint up to step `last` that has a held-out loss."""
    best = []
    for step in place.steps():
        with suppress(BrokenFileError):
            manifest = read_manifest(place.folder(step))
            known = manifest.eval_loss if step <= last else None
            if known is not None and held_out_set(manifest.run) == held_out_set(run):
                best.append(Best(step, known))
    return best
