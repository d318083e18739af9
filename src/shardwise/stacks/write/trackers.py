"""Where the numbers of a run go beside its own file, as other stacks are told."""

from __future__ import annotations

from shardwise.spec.train import Tracker, TrainSettings


def trackers_of(train: TrainSettings) -> tuple[Tracker, ...]:
    """Those that are asked for; unset, TensorBoard, as in `shardwise train` where it is there."""
    return ("tensorboard",) if train.trackers is None else train.trackers
