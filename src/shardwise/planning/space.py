"""What a plan may choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

Recompute = str | float
RECOMPUTE: tuple[Recompute, ...] = (
    *("none", "selective"),
    *(0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875),
    "full",
)
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# A step may miss the asked-for batch by this share; otherwise the nearest is taken.
BATCH_TOLERANCE = 0.02
# The least share of one sequence per device that is rounded up to one.
LEAST_BATCH = 0.75


def _anything(strategy: Strategy) -> bool:
    return True


def _unchanged(strategy: Strategy) -> Strategy:
    return strategy


class Space(NamedTuple):
    """The values of each setting that are tried; kinds and degrees follow from the cluster."""

    recompute: tuple[Recompute, ...] = RECOMPUTE
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    prefetch: tuple[int, ...] = (0, 1, 2)
    forward_prefetch: tuple[int, ...] = (0, 1)
    blocks_per_unit: tuple[int, ...] = (1, 2, 4)
    # None: reductions stay in the dtype of the base strategy; others change the arithmetic.
    reduce_dtypes: tuple[str, ...] = ()
    offload: bool = False
    # Whether a resolved strategy may be chosen. A stack that cannot express a strategy refuses it
    # here; the micro-batch plays no part.
    allowed: Callable[[Strategy], bool] = _anything
    # A resolved strategy as the stack runs it; layouts are tried in that form.
    applied: Callable[[Strategy], Strategy] = _unchanged

    def quick(self) -> Space:
        """Without what the second pass varies, which brings a few percent."""
        return self._replace(prefetch=(1,), forward_prefetch=(0,), blocks_per_unit=(1,))


def placements(
    cluster: ClusterSpec, base: Strategy, accumulates: bool, space: Space | None = None
) -> list[Strategy]:
    """Every way to lay the state out over the devices, resolved, the simplest first.

    `base` gives what a plan does not choose: dtypes and compilation. `space` may change layouts
    into those that a stack runs.
    """
    applied = (space or Space()).applied
    found: list[Strategy] = []
    for fields in _fields(cluster, accumulates):
        try:
            strategy = base.but(**_UNSET, **fields)
            resolved = applied(strategy.resolve(cluster.devices, cluster.devices_per_node))
        except SpecError:
            continue
        if resolved not in found:
            found.append(resolved)
    return found


_UNSET: dict[str, object] = {
    "replicate": None,
    "within_node": False,
    "micro_batch": 1,
    "accumulate": 1,
    "recompute": "none",
    "prefetch": 1,
    "forward_prefetch": 0,
    "blocks_per_unit": 1,
    "offload": False,
    "ddp_bucket_mib": None,
    "reshard_after_backward": None,
}


def _fields(cluster: ClusterSpec, accumulates: bool) -> Iterator[dict[str, object]]:
    def placed(kind: str, shard: int | None = None, **more: object) -> dict[str, object]:
        unset = {"reshard_after_forward": None, "grad_sync": None}
        return {"kind": kind, "shard": shard, **unset, **more}

    if cluster.devices == 1:
        yield placed("single")
        return
    yield placed("ddp")
    for shard in group_sizes(cluster):
        if accumulates:
            yield placed("zero1", shard)
        yield placed("zero2", shard)
        yield placed("zero3", shard)
        if accumulates:
            yield placed("zero3", shard, grad_sync="last")
        if accumulates and shard < cluster.devices:
            yield placed("zero3", shard, grad_sync="every")
        if shard > cluster.devices_per_node > 1:
            yield placed("zero3", shard, reshard_after_forward=cluster.devices_per_node)


def group_sizes(cluster: ClusterSpec) -> list[int]:
    """Degrees of sharding: all devices, then whole nodes and parts of one, by halves."""
    sizes = {cluster.devices}
    nodes = cluster.nodes
    while nodes >= 1:
        if cluster.nodes % nodes == 0:
            sizes.add(nodes * cluster.devices_per_node)
        nodes //= 2
    sizes.add(cluster.devices_per_node)
    part = cluster.devices_per_node
    while part > 1:
        if cluster.devices_per_node % part == 0:
            sizes.add(part)
        part //= 2
    return sorted((size for size in sizes if size > 1), reverse=True)


def batches(job: Job, cluster: ClusterSpec, space: Space) -> list[tuple[int, int]]:
    """Micro-batch and accumulation of every way to make the step's batch."""
    if job.global_batch is None:
        return [(size, 1) for size in space.micro_batches]
    least = job.seq_len * cluster.devices
    wanted = job.global_batch / least
    if wanted < LEAST_BATCH:
        most = job.global_batch // job.seq_len
        raise SpecError(
            f"job.global_batch: {job.global_batch:,} tokens are fewer than one sequence on every "
            f"device ({least:,}); raise it, shorten the sequences, or use at most {most:,} devices"
        )
    # Rounded up from halves.
    pairs = [(size, int(wanted / size + 0.5)) for size in space.micro_batches]
    pairs = [(size, count) for size, count in pairs if count >= 1]
    off = {pair: abs(pair[0] * pair[1] / wanted - 1) for pair in pairs}
    allowed = max(BATCH_TOLERANCE, min(off.values()) + 1e-9)
    return [pair for pair in pairs if off[pair] <= allowed]
