"""Warnings of a plan: devices without fitted runs, little headroom, parallelism not searched."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planning.batches import (
    BATCH_TOLERANCE,
    UnevenBatchError,
    batches,
    neighbours,
)
from shardwise.planning.choice import WANTED_HEADROOM, SearchResult
from shardwise.planning.price import mfu_of
from shardwise.planning.problem import Problem, Units
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.reasons.warnings import (
    BeyondPositions,
    DecimalLength,
    FewerDevices,
    Fragile,
    NoPeerToPeer,
    OnlyReplicated,
    StackLeavesOut,
    UnfittedDevice,
    UnfittedExperts,
    UnquantizedExperts,
)
from shardwise.planning.rows import Candidate
from shardwise.planning.space import Space
from shardwise.predict.fit import other_parallelism
from shardwise.predict.intervals import RUNS_WITH_EXPERTS, evidence
from shardwise.predict.kernels import coefficients_for
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.optimizer_sharding import INSTEAD
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

# If a stack has parallelism that is not searched, a step that waits for communication for a larger
# share than this is not recommended.
MOST_WAITING = 0.5


def left_out_warning(
    problem: Problem, units: Units, space: Space, winner: Candidate | None
) -> StackLeavesOut | None:
    """A warning about a stack's useful parallelism that is not searched; None if there is none."""
    useful = other_parallelism(problem.model)
    kinds = tuple(kind for kind in space.leaves_out if kind in useful)
    if not kinds or problem.cluster.devices == 1:
        return None
    waiting = max(0.0, winner.exposed_s) / winner.step_s if winner else 0.0
    return StackLeavesOut(
        parallelism=kinds,
        recommended=waiting <= MOST_WAITING,
        waiting_share=waiting,
        mfu=mfu_of(problem, units, winner) if winner else None,
        strategy=winner.strategy if winner else None,
    )


def _length_warnings(problem: Problem) -> Iterator[Reason]:
    """Warnings about the requested sequence length."""
    seq_len, positions = problem.job.seq_len, getattr(problem.model, "max_positions", None)
    if positions is not None and seq_len > positions:
        yield BeyondPositions(seq_len=seq_len, positions=positions)
    thousands, rest = divmod(seq_len, 1000)
    if not rest and seq_len % 1024:
        yield DecimalLength(seq_len=seq_len, binary=thousands * 1024)


def warnings_of(
    problem: Problem,
    units: Units,
    space: Space,
    found: SearchResult,
    winner: Candidate | None,
    length_asked: bool,
) -> Iterator[Reason]:
    """All other warnings of a plan: the sequence length, what was not tried, what is uncertain.

    `length_asked` is true if the user chose the sequence length.
    """
    if length_asked:
        yield from _length_warnings(problem)
    device, model, optimizer = problem.cluster.device, problem.model, problem.job.optimizer
    if problem.cluster.devices > 1 and not space.trains(optimizer, Strategy(kind="zero3")):
        yield OnlyReplicated(optimizer=optimizer, instead=INSTEAD)
    # Of a traced model only its units say that it has experts.
    experts = units.experts or None
    near = evidence(problem.cluster)
    if near != "runs":
        yield UnfittedDevice(device=device.name, evidence=near)
    if experts is not None:
        runs, routing = RUNS_WITH_EXPERTS, problem.job.routing
        yield UnfittedExperts(experts=experts, runs=runs, routing=routing)
        adapter = model.adapter
        if adapter is not None and adapter.quantised and not adapter.quantised_experts:
            yield UnquantizedExperts(stored=adapter.base, kept_in=adapter.float_dtype)
    yield from _of_link(problem.cluster, winner)
    if winner is not None and found.is_tight(winner):
        free = found.limit_bytes - winner.needed_bytes
        yield Fragile(
            free_bytes=free,
            headroom=free / found.limit_bytes,
            wanted=WANTED_HEADROOM,
            assumes_even_routing=experts is not None,
        )


def _of_link(cluster: ClusterSpec, winner: Candidate | None) -> Iterator[Reason]:
    """A warning about devices of one node that cannot read each other's memory."""
    device, k = cluster.device, coefficients_for(cluster)
    if not device.p2p and cluster.devices_per_node > 1 and k is not None:
        yield NoPeerToPeer(
            device=device.name,
            link=device.link,
            link_rate=device.link_bandwidth,
            host_rate=k.link_efficiency * device.link_bandwidth,
            divided=winner is not None and winner.strategy.mesh.tensor > 1,
        )


def is_uneven(problem: Problem, space: Space) -> bool:
    """Whether no batch near the requested one divides over all devices."""
    try:
        batches(problem.job, problem.cluster, space.micro_batches, space.batch_tolerance)
    except UnevenBatchError:
        return True
    except SpecError:
        # Fewer sequences than devices: groups of devices share a sequence.
        return False
    return False


def fewer_devices(problem: Problem, space: Space) -> tuple[ClusterSpec, FewerDevices] | None:
    """The largest part of the cluster over which the batch divides, and a warning.

    A slightly smaller part is taken if the batch divides more closely over it. None if only less
    than half of the devices would do.
    """
    job, cluster = problem.job, problem.cluster
    away: list[tuple[float, ClusterSpec]] = []
    for part in _smaller_clusters(cluster):
        least = (1 - BATCH_TOLERANCE) * away[0][1].devices if away else cluster.devices / 2
        if part.devices < least:
            break
        try:
            sizes = batches(job, part, space.micro_batches, space.batch_tolerance)
        except UnevenBatchError:
            continue
        away.append((min(size.deviation for size in sizes), part))
    if not away:
        return None
    closest = min(away, key=lambda one: one[0])[1]
    return closest, FewerDevices(
        devices=closest.devices,
        of_devices=cluster.devices,
        asked=job.global_batch or 0,
        neighbours=neighbours(job, cluster),
    )


def _smaller_clusters(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Clusters with fewer nodes, or with fewer devices of a single node, the largest first."""
    for nodes in range(cluster.nodes - 1, 0, -1):
        yield cluster.but(nodes=nodes)
    if cluster.nodes == 1:
        for devices in range(cluster.devices_per_node - 1, 0, -1):
            yield cluster.but(devices_per_node=devices)
