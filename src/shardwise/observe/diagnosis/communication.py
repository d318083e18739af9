"""Verdicts on exposed communication: late or queued gathers, small messages, slow links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from shardwise.observe.diagnosis.experts import expert_imbalance_of, with_experts
from shardwise.observe.diagnosis.stalls import Stalls
from shardwise.observe.diagnosis.stragglers import RanksOutOfStep, straggler_of
from shardwise.observe.diagnosis.verdict import Verdict, count, mean, plural
from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import bus_bandwidth
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import GATHER_BACKWARD
from shardwise.observe.ranks import JoinedCollectives
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import show_gb, write_bytes
from shardwise.step.words import percent

# Bandwidth is measured on messages for which latency does not matter.
_LARGE_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class LateGathers(Verdict):
    """Gathers started after compute that could have hidden them."""

    cause: Literal["late_gathers"] = "late_gathers"
    gathers: float
    backward_gathers: float
    units: int
    on_cpu: bool

    title = "All-gathers start too late"

    def evidence(self, period: str) -> str:
        units = f" of {plural(self.units, 'FSDP unit')}" if self.units else ""
        backward = f" ({count(self.backward_gathers)} in the backward)"
        return (
            f"{plural(self.gathers, 'all-gather')}{units} {period}"
            f"{backward if self.backward_gathers else ''} start only after compute that could have "
            "hidden them"
        )

    @property
    def fix(self) -> str:
        if self.on_cpu:
            return "none on a CPU, where FSDP2 waits for every all-gather; on GPUs it can prefetch"
        return "set strategy.prefetch and strategy.forward_prefetch to 1 or 2"


@dataclass(frozen=True, kw_only=True)
class QueuedGathers(Verdict):
    """Gathers that waited in the queue behind a reduce-scatter."""

    cause: Literal["queued_gathers"] = "queued_gathers"
    gathers: float

    title = "All-gathers queued behind reduce-scatters"
    fix = "use a separate communicator for reductions: model.set_separate_reduce_scatter_group()"

    def evidence(self, period: str) -> str:
        return (
            f"{plural(self.gathers, 'all-gather')} {period} are issued while a reduce-scatter "
            "runs, and start only when it ends"
        )


@dataclass(frozen=True, kw_only=True)
class SmallMessages(Verdict):
    """Messages whose time is latency, not bandwidth."""

    cause: Literal["small_messages"] = "small_messages"
    calls: float
    all_calls: float
    limit_bytes: int
    median_bytes: float

    title = "Latency of small messages"
    fix = (
        "group more blocks into an FSDP unit (strategy.blocks_per_unit), or use larger DDP buckets"
    )

    def evidence(self, period: str) -> str:
        return (
            f"{count(self.calls)} of {count(self.all_calls)} collectives {period} are exposed and "
            f"move less than {write_bytes(self.limit_bytes)} (median {show_gb(self.median_bytes)})"
        )


@dataclass(frozen=True, kw_only=True)
class SlowLink(Verdict):
    """Large messages reach only a share of the link's bandwidth."""

    cause: Literal["slow_link"] = "slow_link"
    operation: str
    reached_share: float

    fix = "check the fabric: NCCL_DEBUG=INFO shows rings, GPUDirect and NICs; then run nccl-tests"

    @property
    def title(self) -> str:
        return f"Slow link in {self.operation}"

    def evidence(self, period: str) -> str:
        return f"Large messages reach {percent(self.reached_share)} of the link's bandwidth"


_FEWER_BYTES = {
    "all-gather": "raise the micro-batch, shard within a node (hsdp), or keep parameters gathered "
    "after the forward (zero2)",
    "reduce-scatter": "raise the micro-batch or accumulate gradients: fewer bytes per token",
    "all-reduce": "raise the micro-batch or accumulate gradients: fewer bytes per token",
}


@dataclass(frozen=True, kw_only=True)
class ExposedCommunication(Verdict):
    """The remaining exposed time of an operation: longer than the compute it overlaps with.

    With `other_ranks_unknown`, part of it may be waiting: only one rank's trace was given.
    """

    cause: Literal["exposed_communication"] = "exposed_communication"
    operation: str
    calls: float
    exposed_share: float
    other_ranks_unknown: bool

    @property
    def title(self) -> str:
        return f"Exposed {self.operation}"

    def evidence(self, period: str) -> str:
        exposed = (
            f"{plural(self.calls, 'call')} {period}; {percent(self.exposed_share)} of their time "
            "is not overlapped by compute"
        )
        if self.other_ranks_unknown:
            exposed += ". Part of it may be waiting: add the traces of the other ranks"
        return exposed

    @property
    def fix(self) -> str:
        return _FEWER_BYTES.get(self.operation, "start it earlier, or move fewer bytes")


# ---- find the verdicts of a run --------------------------------------------------------------


def transfers_of(summary: Summary) -> list[Ints | None]:
    """Transfer nanoseconds of every call, one array per rank; -1 for an unmatched call.

    Each array is None if no collective could be matched across ranks.
    """
    if summary.joined is None:
        return [None] * len(summary.ranks)
    return [*summary.joined.transfers_of([len(rank.calls) for rank in summary.ranks])]


def _per_step(ranks: list[RankSummary], spent: list[Ints]) -> float:
    """Nanoseconds per step, mean over ranks; `spent` has the nanoseconds of each call of a rank."""
    return mean([rank.per_step(int(one.sum())) for rank, one in zip(ranks, spent, strict=True)])


def waiting_verdicts(
    summary: Summary, joined: JoinedCollectives, stalls: list[Stalls], limits: Thresholds
) -> Iterator[Verdict]:
    """Yield the verdicts on waiting: uneven experts, and a few stragglers or all ranks in turn.

    Waiting for a straggler that is late because of its experts is not told twice.
    """
    imbalance = expert_imbalance_of(summary, joined, stalls)
    straggler = straggler_of(summary, joined, stalls, limits)
    if straggler is not None and imbalance is not None:
        straggler = with_experts(straggler, imbalance)
    if imbalance is not None and (straggler is None or straggler.reason != "experts"):
        yield imbalance
    if straggler is not None:
        yield straggler
        return
    waiting = _per_step(summary.ranks, [stall.waiting_ns for stall in stalls])
    late = joined.last_to_arrive()
    latest = int(late.argmax())
    yield RanksOutOfStep(
        saves_ns=max(0.0, waiting - (imbalance.saves_ns if imbalance is not None else 0.0)),
        latest_rank=summary.ranks[latest].name,
        last_to_arrive=int(late[latest]),
        collectives=int(late.sum()),
    )


def late_gather_verdicts(ranks: list[RankSummary], stalls: list[Stalls]) -> Iterator[Verdict]:
    """Yield a verdict on all-gathers that could have started earlier, if there are any.

    It counts the all-gathers of the rank that loses most time by this.
    """
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


def queued_gather_verdicts(ranks: list[RankSummary], stalls: list[Stalls]) -> Iterator[Verdict]:
    """Yield a verdict on all-gathers that waited for a reduce-scatter, if there are any."""
    gathers = max(
        rank.per_step(int((one.queued_ns > 0).sum()))
        for rank, one in zip(ranks, stalls, strict=True)
    )
    if gathers:
        saves = _per_step(ranks, [one.queued_ns for one in stalls])
        yield QueuedGathers(saves_ns=saves, gathers=gathers)


def small_message_verdicts(
    ranks: list[RankSummary], stalls: list[Stalls], limits: Thresholds
) -> Iterator[Verdict]:
    """Yield a verdict on messages dominated by latency, if there are any.

    It counts the messages of the rank that loses most time by this.
    """
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


def slow_link_verdicts(
    summary: Summary, stalls: list[Stalls], limits: Thresholds, cluster: ClusterSpec | None
) -> Iterator[Verdict]:
    """Yield verdicts on the remaining exposed time of each operation.

    They are a slow link, and too little compute to overlap with.
    """
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
    """Median bus bandwidth of an operation's large messages, as a share of the link's bandwidth.

    Time spent waiting for other ranks is left out where it is known. None without a cluster, or
    without messages of at least 16 MiB.
    """
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

    The link inside a node, or the network if the group spans nodes. `key` is the key of a call; the
    ranks of the group are listed in its brackets.
    """
    inside = cluster.device.link_bandwidth
    members = [int(number) for number in re.findall(r"\d+", key.partition("[")[2])]
    nodes = {member // cluster.devices_per_node for member in members}
    spans_nodes = len(nodes) > 1 if members else group_size > cluster.devices_per_node
    return cluster.network or inside if spans_nodes else inside
