"""Predict single configurations as the search does, also on another network."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.planning.problem import Problem, Units, peaks, steps, times
from shardwise.planning.rows import Candidate
from shardwise.predict.configurations import Configurations
from shardwise.predict.work import model_flops_per_token
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.strategy import Strategy


def price_one(
    problem: Problem, units: Units, strategy: Strategy, cluster: ClusterSpec | None = None
) -> Candidate:
    """Predict memory and time of a resolved strategy, on the problem's cluster or `cluster`.

    `cluster` must have as many devices as the problem's.
    """
    (candidate,) = price_alike(problem, units, [strategy], cluster)
    return candidate


def price_alike(
    problem: Problem,
    units: Units,
    strategies: Sequence[Strategy],
    cluster: ClusterSpec | None = None,
) -> list[Candidate]:
    """Predict memory and time of several resolved strategies with the same model units.

    `cluster` is as in `price_one`.
    """
    priced = steps(units.of(strategies[0]), Configurations.of(strategies), problem)
    peak, needed = peaks(priced, problem)
    found = times(priced, cluster or problem.cluster, strategies[0].param_dtype)
    return [
        Candidate(
            strategy=strategy,
            peak_bytes=float(peak[row]),
            needed_bytes=float(needed[row]),
            tokens_per_s=problem.job.tokens_per_step(strategy) / float(found.step_s[row]),
            step_s=float(found.step_s[row]),
            compute_s=float(found.compute_s[row]),
            copy_s=float(found.copy_s[row]),
            exposed_s=float(found.exposed_communication_s[row]),
            optimizer_s=float(found.optimizer_s[row]),
        )
        for row, strategy in enumerate(strategies)
    ]


def scaled_network(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with its network (on a single node: its link) made `factor` times as fast."""
    # Copied without validation, which refuses such small numbers without a unit.
    if cluster.nodes > 1:
        assert cluster.network is not None
        return cluster.model_copy(update={"network": cluster.network * factor})
    return scaled_link(cluster, factor)


def scaled_link(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with the link inside a node made `factor` times as fast."""
    link = cluster.device.link_bandwidth * factor
    device = cluster.device.model_copy(update={"link_bandwidth": link})
    return cluster.model_copy(update={"device": device})


def mfu_of(problem: Problem, units: Units, candidate: Candidate) -> float:
    """Model FLOPs utilization: the share of the cluster's dense peak spent on model FLOPs."""
    cluster, strategy = problem.cluster, candidate.strategy
    peak = cluster.device.peak_flops(strategy.param_dtype)
    assert peak is not None, "checked before the search"
    per_token = model_flops_per_token(units.of(strategy))
    return candidate.tokens_per_s * per_token / (peak * cluster.devices)
