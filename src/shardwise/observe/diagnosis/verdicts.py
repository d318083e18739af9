"""Verdicts on a run: causes of lost time, the largest saving first.

Times are nanoseconds per optimizer step, averaged over the given ranks. Savings overlap: fixing one
cause can shrink another, so they must not be added.
"""

from __future__ import annotations

from shardwise.observe.diagnosis import communication, device
from shardwise.observe.diagnosis.stalls import stalls_of
from shardwise.observe.diagnosis.verdict import Health, Verdict, mean
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.spec.cluster import ClusterSpec


def health_of(summary: Summary, thresholds: Thresholds) -> Health:
    """Step time, compute share, idle time and overlap of a run, means over ranks."""
    ranks = summary.ranks
    communicating = sum(r.profiled.communication_ns for r in ranks)
    compute = mean([r.profiled.compute_ns / max(1, r.profiled.window_ns) for r in ranks])
    overlapped = sum(r.profiled.overlapped_ns for r in ranks)
    return Health(
        steps=max(len(r.steps) for r in ranks),
        step_ns=mean([r.per_step(r.profiled.window_ns) for r in ranks]),
        compute=compute,
        idle_ns=mean([r.per_step(r.profiled.idle_ns) for r in ranks]),
        overlap=overlapped / communicating if communicating else None,
        healthy=compute >= thresholds.compute,
    )


def verdicts_of(
    summary: Summary, thresholds: Thresholds | None = None, cluster: ClusterSpec | None = None
) -> list[Verdict]:
    """Causes of lost time, the largest saving first; empty for a healthy run."""
    limits = thresholds or Thresholds()
    health = health_of(summary, limits)
    if health.healthy:
        return []
    ranks, joined = summary.ranks, summary.joined
    transfers = communication.transfers_of(summary)
    stalls = [stalls_of(*pair, limits) for pair in zip(ranks, transfers, strict=True)]
    verdicts: list[Verdict] = []
    if joined is not None:
        verdicts += communication.waiting_verdicts(summary, joined, stalls, limits)
    verdicts += communication.late_gather_verdicts(ranks, stalls)
    verdicts += communication.queued_gather_verdicts(ranks, stalls)
    verdicts += communication.small_message_verdicts(ranks, stalls, limits)
    verdicts += communication.slow_link_verdicts(summary, stalls, limits, cluster)
    verdicts += device.idle_verdicts(ranks)
    verdicts += device.copy_verdicts(ranks)
    if cluster is not None:
        verdicts += device.matmul_verdicts(ranks, limits, cluster)
    smallest = limits.least * health.step_ns
    return sorted((v for v in verdicts if v.saves_ns >= smallest), key=lambda v: -v.saves_ns)
