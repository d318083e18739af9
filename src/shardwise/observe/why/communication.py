"""Verdicts on exposed communication: late, queued, small, slow, or waiting for other ranks."""

from __future__ import annotations

import re
from statistics import median

import numpy as np

from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import bus_bandwidth
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import GATHER_BACKWARD
from shardwise.observe.ranks import Joined
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.observe.why.losses import Losses
from shardwise.observe.why.stragglers import Straggler, straggler_of
from shardwise.observe.why.verdict import Verdict, lost, mean, sentence
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import show_gb, write_bytes

# Bandwidth is told by messages that latency does not decide.
_LARGE = 16 * 2**20


def transfers_of(summary: Summary) -> list[Ints | None]:
    """Of each rank the transfer of each call, where ranks could be joined."""
    if summary.joined is None:
        return [None] * len(summary.ranks)
    return [*summary.joined.transfers_of([len(rank.calls) for rank in summary.ranks])]


def _per_step(ranks: list[RankSummary], spent: list[Ints]) -> float:
    """Nanoseconds of all calls in one step of the average rank."""
    return mean([rank.per_step(int(one.sum())) for rank, one in zip(ranks, spent, strict=True)])


def waiting(
    summary: Summary, joined: Joined, losses: list[Losses], limits: Thresholds
) -> list[Verdict]:
    found = straggler_of(summary, joined, losses, limits)
    if found is None:
        return _turns(summary, joined, losses)
    how_much = lost(found.caused_ns, summary.ranks)
    return [
        Verdict(
            cause="straggler",
            saves_ns=found.caused_ns,
            statement=f"{_names(found)} the others waiting, {how_much}",
            evidence=f"{found.reason}; last in {found.last} of {found.collectives} collectives",
            change={
                "data": "give that rank's data loader more workers, or look at its disk",
                "compute": "look at that device: clocks, temperature, other jobs, more tokens",
                "host": "look at that host: other processes, slow Python, its CPU's clocks",
            }[found.cause],
        )
    ]


def _turns(summary: Summary, joined: Joined, losses: list[Losses]) -> list[Verdict]:
    """Waiting that no rank is to blame for."""
    waiting = _per_step(summary.ranks, [loss.waiting_ns for loss in losses])
    late = joined.last_to_arrive()
    worst = int(late.argmax())
    return [
        Verdict(
            cause="ranks out of step",
            saves_ns=waiting,
            statement=f"Ranks wait for each other in turn, {lost(waiting, summary.ranks)}",
            evidence=f"nobody is late always: {summary.ranks[worst].name} is last in "
            f"{late[worst]} of {joined.collectives} collectives",
            change="give every rank the same number of tokens, and its processes cores of their "
            "own",
        )
    ]


def _names(found: Straggler) -> str:
    if len(found.ranks) == 1:
        return f"{found.ranks[0].capitalize()} keeps"
    listed = ", ".join(name.removeprefix("rank ") for name in found.ranks)
    return f"Ranks {listed} keep"


def late(ranks: list[RankSummary], losses: list[Losses]) -> list[Verdict]:
    saves = _per_step(ranks, [loss.late_ns for loss in losses])
    rank, loss = max(zip(ranks, losses, strict=True), key=lambda pair: int(pair[1].late_ns.sum()))
    calls = np.flatnonzero(loss.late_ns).tolist()
    if not calls:
        return []
    backward = [i for i in calls if rank.places[i].role == GATHER_BACKWARD]
    units = {rank.places[i].unit for i in calls} - {""}
    where = f" of {len(units)} units" if units else ""
    when = f", {len(backward)} of them in the backward" if backward else ""
    change = (
        "on a CPU hooks wait for their gather; nothing can be prefetched there"
        if rank.on_cpu
        else "set strategy.prefetch and strategy.forward_prefetch to 1 or 2"
    )
    return [
        Verdict(
            cause="gathers not prefetched",
            saves_ns=saves,
            statement=f"Gathers start too late: {lost(saves, ranks)}",
            evidence=f"{len(calls)} gathers{where}{when} began only after compute that had no "
            "collective beside it",
            change=change,
        )
    ]


def serialised(ranks: list[RankSummary], losses: list[Losses]) -> list[Verdict]:
    saves = _per_step(ranks, [loss.serialised_ns for loss in losses])
    calls = max(int((x.serialised_ns > 0).sum()) for x in losses)
    if not calls:
        return []
    return [
        Verdict(
            cause="gather and reduce-scatter serialised",
            saves_ns=saves,
            statement=f"Gathers stand behind reduce-scatters: {lost(saves, ranks)}",
            evidence=f"{calls} gathers were asked for while a reduce-scatter ran, and began when "
            "it ended",
            change="give reductions a communicator of their own: "
            "model.set_separate_reduce_scatter_group()",
        )
    ]


def small(ranks: list[RankSummary], losses: list[Losses], limits: Thresholds) -> list[Verdict]:
    saves = _per_step(ranks, [loss.small_ns for loss in losses])
    rank, loss = max(zip(ranks, losses, strict=True), key=lambda pair: int(pair[1].small_ns.sum()))
    mine = np.flatnonzero(loss.small_ns)
    if not len(mine):
        return []
    size = float(np.median(rank.calls.moved_bytes[mine]))
    return [
        Verdict(
            cause="small messages",
            saves_ns=saves,
            statement=f"Messages are too small for their latency: {lost(saves, ranks)}",
            evidence=f"{len(mine)} of {len(rank.calls)} collectives move less than "
            f"{write_bytes(limits.small_message)}, half of those less than {show_gb(size)}",
            change="put more blocks into a unit (strategy.blocks_per_unit), or larger DDP buckets",
        )
    ]


def slow(
    summary: Summary, losses: list[Losses], limits: Thresholds, cluster: ClusterSpec | None
) -> list[Verdict]:
    """What is left of the exposed time, by operation: the link, or too little to hide behind."""
    found = []
    ranks = summary.ranks
    operations = sorted({op for rank in ranks for op in rank.calls.operation})
    for operation in operations:
        spent = [
            loss.slow_ns[np.asarray(rank.calls.operation) == operation]
            for rank, loss in zip(ranks, losses, strict=True)
        ]
        exposed = _per_step(ranks, spent)
        share = _reached(summary, operation, cluster)
        if share is not None and share < limits.link:
            saves = exposed * (1 - share / limits.link)
            found.append(
                Verdict(
                    cause="slow link",
                    saves_ns=saves,
                    statement=f"The link is slow in {operation}: {lost(saves, ranks)}",
                    evidence=f"large messages reach {share:.0%} of what the link can",
                    change="look at the fabric: NCCL_DEBUG=INFO tells rings, GPUDirect and NICs; "
                    "then a link's own test",
                )
            )
            exposed -= saves
        found.append(
            Verdict(
                cause=f"exposed {operation}",
                saves_ns=exposed,
                statement=f"{sentence(operation)} has no compute to hide behind: "
                f"{lost(exposed, ranks)}",
                evidence=_alone(ranks, operation),
                change=_FEWER_BYTES.get(operation, "start it earlier, or move fewer bytes"),
            )
        )
    return found


_FEWER_BYTES = {
    "all-gather": "raise the micro-batch, shard within a node (hsdp), or keep parameters after the "
    "forward (zero2)",
    "reduce-scatter": "raise the micro-batch or accumulate, so that fewer bytes move per token",
    "all-reduce": "raise the micro-batch or accumulate, so that fewer bytes move per token",
}


def _alone(ranks: list[RankSummary], operation: str) -> str:
    """How exposed an operation is; one rank of several cannot tell transfer from waiting."""
    mine = [one for rank in ranks for one in rank.collectives if one.operation == operation]
    total = sum(one.total_ns for one in mine)
    share = sum(one.exposed_ns for one in mine) / max(1, total)
    text = f"{mine[0].calls} calls, {share:.0%} of their time with nothing computing beside them"
    if len(ranks) == 1 and (ranks[0].world_size or 1) > 1:
        text += "; waiting for other ranks may be part of it: give their traces too"
    return text


def _reached(summary: Summary, operation: str, cluster: ClusterSpec | None) -> float | None:
    """Bus bandwidth of large messages as a share of the link's; waiting left out where known."""
    if cluster is None:
        return None
    shares = []
    for rank, known in zip(summary.ranks, transfers_of(summary), strict=True):
        calls = rank.calls
        times = calls.lasted_ns if known is None else np.where(known >= 0, known, calls.lasted_ns)
        for i, name in enumerate(calls.operation):
            size, group = int(calls.moved_bytes[i]), int(calls.group_size[i])
            if name != operation or size < _LARGE:
                continue
            reached = bus_bandwidth(name, size, group, int(times[i]))
            if reached is not None:
                shares.append(reached / link_of(cluster, calls.key[i], group))
    return median(shares) if shares else None


def link_of(cluster: ClusterSpec, key: str, group_size: int) -> float:
    """The link that carries a group, in bytes per second one way: inside a node, or between."""
    inside = cluster.device.link_bandwidth
    members = [int(number) for number in re.findall(r"\d+", key.partition("[")[2])]
    nodes = {member // cluster.devices_per_node for member in members}
    spans = len(nodes) > 1 if members else group_size > cluster.devices_per_node
    return cluster.network or inside if spans else inside
