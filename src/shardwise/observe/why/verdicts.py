"""Why a run is slow: causes ranked by the time they would save, each with evidence and a change.

Everything is nanoseconds of one optimizer step, averaged over the ranks given. Savings of two
causes do not add up: what one hides, the other cannot save again.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.observe.why import communication, device
from shardwise.observe.why.losses import losses_of
from shardwise.observe.why.verdict import Verdict, mean
from shardwise.spec.cluster import ClusterSpec


class Health(NamedTuple):
    """One step of the average rank, in nanoseconds; shares of it."""

    # How many steps were marked; with none, the whole trace stands for one.
    steps: int
    step_ns: float
    compute: float
    idle_ns: float
    overlap: float | None
    healthy: bool


def health_of(summary: Summary, thresholds: Thresholds) -> Health:
    """The usual three figures, per optimizer step."""
    ranks = summary.ranks
    moved = sum(r.inside.communication_ns for r in ranks)
    compute = mean([r.inside.compute_ns / max(1, r.inside.window_ns) for r in ranks])
    return Health(
        steps=max(len(r.steps) for r in ranks),
        step_ns=mean([r.per_step(r.inside.window_ns) for r in ranks]),
        compute=compute,
        idle_ns=mean([r.per_step(r.inside.idle_ns) for r in ranks]),
        overlap=sum(r.inside.overlapped_ns for r in ranks) / moved if moved else None,
        healthy=compute >= thresholds.compute,
    )


def verdicts_of(
    summary: Summary, thresholds: Thresholds | None = None, cluster: ClusterSpec | None = None
) -> list[Verdict]:
    """The largest saving first; none for a healthy run."""
    limits = thresholds or Thresholds()
    health = health_of(summary, limits)
    if health.healthy:
        return []
    ranks, joined = summary.ranks, summary.joined
    transfers = communication.transfers_of(summary)
    losses = [losses_of(*pair, limits) for pair in zip(ranks, transfers, strict=True)]
    found: list[Verdict] = []
    if joined is not None:
        found += communication.waiting(summary, joined, losses, limits)
    found += communication.late(ranks, losses)
    found += communication.serialised(ranks, losses)
    found += communication.small(ranks, losses, limits)
    found += communication.slow(summary, losses, limits, cluster)
    found += device.idle(ranks)
    found += device.copies(ranks)
    if cluster is not None:
        found += device.products(ranks, limits, cluster)
    least = limits.least * health.step_ns
    return sorted((v for v in found if v.saves_ns >= least), key=lambda v: -v.saves_ns)
