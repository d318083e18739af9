"""One configuration, priced as the search prices thousands; and the same on another cluster."""

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
    """What a resolved strategy takes, on the problem's cluster or one of the same size."""
    (candidate,) = price_alike(problem, units, [strategy], cluster)
    return candidate


def price_alike(
    problem: Problem,
    units: Units,
    strategies: Sequence[Strategy],
    cluster: ClusterSpec | None = None,
) -> list[Candidate]:
    """The same of several at once that share units."""
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
    """The cluster with its slowest way between devices made `factor` times as fast."""
    # Copied without validation: no bare number so small is accepted from a person.
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
    """The share of the cluster's dense peak that goes into the model's own FLOPs."""
    cluster, strategy = problem.cluster, candidate.strategy
    peak = cluster.device.peak_flops(strategy.param_dtype)
    assert peak is not None, "checked before the search"
    per_token = model_flops_per_token(units.of(strategy))
    return candidate.tokens_per_s * per_token / (peak * cluster.devices)
