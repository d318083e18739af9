"""Verdicts on a device that idles, copies, or computes slowly."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.observe.diagnosis.verdict import (
    ExposedCopies,
    IdleCause,
    IdleDevice,
    SlowMatmuls,
    Verdict,
    mean,
)
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rules import Thresholds
from shardwise.spec.cluster import ClusterSpec

# The field of Idle that measures each cause.
IDLE_FIELDS: dict[IdleCause, str] = {
    "data_loading": "data_ns",
    "allocator": "allocator_ns",
    "rate_limiter": "rate_limiter_ns",
    "synchronisation": "synchronisation_ns",
    "launch_bound": "launch_ns",
    "unexplained_idle": "unexplained_ns",
}


def idle(ranks: list[RankSummary]) -> Iterator[Verdict]:
    """A verdict per cause of idle time."""
    for cause, field in IDLE_FIELDS.items():
        spent = [getattr(rank.host.idle, field) for rank in ranks]
        saves = mean([rank.per_step(one) for rank, one in zip(ranks, spent, strict=True)])
        if not saves:
            continue
        worst = ranks[spent.index(max(spent))]
        host = worst.host
        calls = {"allocator": host.allocator_calls, "synchronisation": host.synchronisations}
        yield IdleDevice(
            cause=cause,
            saves_ns=saves,
            rank=worst.name,
            on_cpu=worst.on_cpu,
            calls=worst.per_step(calls[cause]) if cause in calls else None,
            synchronised_by=host.synchronised_by if cause == "synchronisation" else "",
            data_loading_ns=worst.per_step(host.data_ns) if cause == "data_loading" else None,
        )


def copies(ranks: list[RankSummary]) -> Iterator[Verdict]:
    """Copies that nothing overlaps with."""
    saves = mean([rank.per_step(rank.profiled.exposed_copy_ns) for rank in ranks])
    if saves:
        yield ExposedCopies(saves_ns=saves, on_cpu=any(rank.on_cpu for rank in ranks))


def matmuls(
    ranks: list[RankSummary], limits: Thresholds, cluster: ClusterSpec
) -> Iterator[Verdict]:
    """Matmuls below the expected share of the device's peak, on the slowest rank."""
    known = [(rank, rank.matmul) for rank in ranks if rank.matmul is not None]
    if not known:
        return
    rank, slowest = min(known, key=lambda pair: pair[1].flops_per_s)
    peak = cluster.device.peak_flops(slowest.dtype)
    if not peak or slowest.flops_per_s >= limits.matmul * peak:
        return
    share = slowest.flops_per_s / peak
    yield SlowMatmuls(
        saves_ns=rank.per_step(slowest.time_ns) * (1 - share / limits.matmul),
        calls=rank.per_step(slowest.calls),
        dtype=slowest.dtype,
        device=cluster.device.name,
        reached_share=share,
    )
