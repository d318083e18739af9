"""Experiment trackers of a run, besides its metrics file."""

from __future__ import annotations

from shardwise.spec.train import Tracker, TrainSettings


def trackers_of(train: TrainSettings) -> tuple[Tracker, ...]:
    """The configured trackers; by default TensorBoard."""
    return ("tensorboard",) if train.trackers is None else train.trackers
