"""Verdicts on exposed communication: waiting, late, queued, small or slow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

import numpy as np

from shardwise.observe.diagnosis.stalls import Stalls
from shardwise.observe.diagnosis.stragglers import straggler_of
from shardwise.observe.diagnosis.verdict import (
    ExposedCommunication,
    LateGathers,
    QueuedGathers,
    RanksOutOfStep,
    SlowLink,
    SmallMessages,
    Verdict,
    mean,
)
from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import bus_bandwidth
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import GATHER_BACKWARD
from shardwise.observe.ranks import Joined
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.spec.cluster import ClusterSpec

# Bandwidth is measured on messages for which latency does not matter.
_LARGE_BYTES = 16 * 2**20


def transfers_of(summary: Summary) -> list[Ints | None]:
    """Transfer time of every call, by rank; None where ranks were not matched."""
    if summary.joined is None:
        return [None] * len(summary.ranks)
    return [*summary.joined.transfers_of([len(rank.calls) for rank in summary.ranks])]


def _per_step(ranks: list[RankSummary], spent: list[Ints]) -> float:
    """Sum over calls per step, average over ranks."""
    return mean([rank.per_step(int(one.sum())) for rank, one in zip(ranks, spent, strict=True)])


def waiting(
    summary: Summary, joined: Joined, stalls: list[Stalls], limits: Thresholds
) -> Iterator[Verdict]:
    """Waiting for other ranks: for a few stragglers, or for each other in turn."""
    straggler = straggler_of(summary, joined, stalls, limits)
    if straggler is not None:
        yield straggler
        return
    late = joined.last_to_arrive()
    latest = int(late.argmax())
    yield RanksOutOfStep(
        saves_ns=_per_step(summary.ranks, [stall.waiting_ns for stall in stalls]),
        latest_rank=summary.ranks[latest].name,
        last_to_arrive=int(late[latest]),
        collectives=int(late.sum()),
    )


def late(ranks: list[RankSummary], stalls: list[Stalls]) -> Iterator[Verdict]:
    """Gathers that could have started earlier, on the rank that loses most by them."""
    rank, stall = max(zip(ranks, stalls, strict=True), key=lambda pair: int(pair[1].late_ns.sum()))
    calls = np.flatnonzero(stall.late_ns).tolist()
    if calls:
        yield LateGathers(
            saves_ns=_per_step(ranks, [one.late_ns for one in stalls]),
            gathers=rank.per_step(len(calls)),
            backward_gathers=rank.per_step(
                sum(rank.purposes[i].role == GATHER_BACKWARD for i in calls)
            ),
            units=len({rank.purposes[i].unit for i in calls} - {""}),
            on_cpu=rank.on_cpu,
        )


def queued(ranks: list[RankSummary], stalls: list[Stalls]) -> Iterator[Verdict]:
    """Gathers that were issued in time and had to wait for a reduce-scatter."""
    gathers = max(
        rank.per_step(int((one.queued_ns > 0).sum()))
        for rank, one in zip(ranks, stalls, strict=True)
    )
    if gathers:
        saves = _per_step(ranks, [one.queued_ns for one in stalls])
        yield QueuedGathers(saves_ns=saves, gathers=gathers)


def small(ranks: list[RankSummary], stalls: list[Stalls], limits: Thresholds) -> Iterator[Verdict]:
    """Messages dominated by latency, on the rank that loses most by them."""
    rank, stall = max(
        zip(ranks, stalls, strict=True), key=lambda pair: int(pair[1].small_message_ns.sum())
    )
    mine = np.flatnonzero(stall.small_message_ns)
    if len(mine):
        yield SmallMessages(
            saves_ns=_per_step(ranks, [one.small_message_ns for one in stalls]),
            calls=rank.per_step(len(mine)),
            all_calls=rank.per_step(sum(one.calls for one in rank.collectives)),
            limit_bytes=limits.small_message,
            median_bytes=float(np.median(rank.calls.moved_bytes[mine])),
        )


def slow(
    summary: Summary, stalls: list[Stalls], limits: Thresholds, cluster: ClusterSpec | None
) -> Iterator[Verdict]:
    """The rest of the exposed time by operation: a slow link, or too little compute to overlap."""
    ranks = summary.ranks
    for operation in sorted({op for rank in ranks for op in rank.calls.operation}):
        spent = [
            stall.transfer_ns[np.asarray(rank.calls.operation) == operation]
            for rank, stall in zip(ranks, stalls, strict=True)
        ]
        exposed = _per_step(ranks, spent)
        share = _reached_share(summary, operation, cluster)
        if share is not None and share < limits.link:
            saves = exposed * (1 - share / limits.link)
            yield SlowLink(saves_ns=saves, operation=operation, reached_share=share)
            exposed -= saves
        mine = [
            (rank, one) for rank in ranks for one in rank.collectives if one.operation == operation
        ]
        if mine:
            total = max(1, sum(one.total_ns for _, one in mine))
            yield ExposedCommunication(
                saves_ns=exposed,
                operation=operation,
                calls=mean([rank.per_step(one.calls) for rank, one in mine]),
                exposed_share=sum(one.exposed_ns for _, one in mine) / total,
                other_ranks_unknown=len(ranks) == 1 and (ranks[0].world_size or 1) > 1,
            )


def _reached_share(summary: Summary, operation: str, cluster: ClusterSpec | None) -> float | None:
    """Bus bandwidth of large messages over the link's; without waiting where that is known."""
    if cluster is None:
        return None
    shares = []
    for rank, known in zip(summary.ranks, transfers_of(summary), strict=True):
        calls = rank.calls
        times = (
            calls.duration_ns if known is None else np.where(known >= 0, known, calls.duration_ns)
        )
        for i, name in enumerate(calls.operation):
            size, group = int(calls.moved_bytes[i]), int(calls.group_size[i])
            if name != operation or size < _LARGE_BYTES:
                continue
            reached = bus_bandwidth(name, size, group, int(times[i]))
            if reached is not None:
                shares.append(reached / link_of(cluster, calls.key[i], group))
    return median(shares) if shares else None


def link_of(cluster: ClusterSpec, key: str, group_size: int) -> float:
    """Bandwidth of the link that carries a group, in bytes per second one way.

    The link inside a node, or the network if the group spans nodes.
    """
    inside = cluster.device.link_bandwidth
    members = [int(number) for number in re.findall(r"\d+", key.partition("[")[2])]
    nodes = {member // cluster.devices_per_node for member in members}
    spans_nodes = len(nodes) > 1 if members else group_size > cluster.devices_per_node
    return cluster.network or inside if spans_nodes else inside
