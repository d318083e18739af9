"""Predict one step of a run, as figures or as a simulated timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.predict.estimate import price
from shardwise.predict.parts import price_parts
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.unequal import check_equal, is_unequal
from shardwise.step.profile import StepProfile
from shardwise.units.load import job_units

if TYPE_CHECKING:
    from shardwise.step.spans import Timeline


def estimate_run(run: RunSpec, *, along_rows: bool = False) -> StepProfile:
    """Predict memory, traffic and time of one step of a run whose strategy is resolved.

    `along_rows` is for stacks that shard every tensor along its rows, which pads stacked experts.
    """
    units = job_units(run.model, run.job, run.strategy, run.cluster)
    units = units.sharded_along_rows() if along_rows else units
    origin = "formulas" if isinstance(run.model, ModelSpec) else "traced module"

    def alike(strategy: Strategy, cluster: ClusterSpec) -> StepProfile:
        """Predict a step of equal devices with equal shares."""
        return price(units, strategy, cluster, run.job, origin)

    if is_unequal(run):
        return price_parts(run, alike)
    return alike(run.strategy, run.cluster)


def replay_run(run: RunSpec) -> Timeline | None:
    """Simulate one step, stream by stream; None if the cluster's rates are unknown."""
    from shardwise.predict.replay import replay

    check_equal(run, "a simulated timeline")
    units = job_units(run.model, run.job, run.strategy, run.cluster)
    return replay(units, run.strategy, run.cluster, run.job)
