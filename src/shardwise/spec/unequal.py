"""Runs whose devices, or the shares of a step that these compute, are not all alike."""

from __future__ import annotations

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec


def is_unequal(run: RunSpec) -> bool:
    """Whether the devices of a run, or their shares of a step, are not all alike."""
    return run.cluster.parts is not None or run.strategy.shares is not None


_KNOWN_BY = "the commands plan, estimate and train know clusters of unequal parts"


def check_equal(run: RunSpec, what: str, instead: str = _KNOWN_BY) -> RunSpec:
    """The run; SpecError if its devices or their shares differ, which `what` is not built for.

    `instead` says what to do with unequal devices.
    """
    if run.cluster.parts is not None:
        raise SpecError(f"cluster: {what} needs equal devices, not {run.cluster}; {instead}")
    if run.strategy.shares is not None:
        raise SpecError(f"strategy.shares: {what} needs equal shares; leave shares out")
    return run
