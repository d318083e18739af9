"""Why a run is slow: causes ranked by the time they would save, each with evidence and a change.

Everything is nanoseconds of one optimizer step, averaged over the ranks given. Savings of two
causes do not add up: what one hides, the other cannot save again.
"""

from __future__ import annotations

import re
from statistics import median
from typing import NamedTuple

import numpy as np

from shardwise.observe.calls import bus_bandwidth
from shardwise.observe.losses import Losses, losses_of
from shardwise.observe.ranks import Joined
from shardwise.observe.rules import Thresholds
from shardwise.observe.stragglers import Straggler, straggler_of
from shardwise.observe.summary import RankSummary, Summary
from shardwise.observe.trace import Ints
from shardwise.observe.units import GATHER_BACKWARD
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import show_gb, write_bytes

_MILLISECOND = 1e6
# Bandwidth is told by messages that latency does not decide.
_LARGE = 16 * 2**20


class Verdict(NamedTuple):
    """One cause of lost time."""

    cause: str
    saves_ns: float
    statement: str
    evidence: str
    change: str


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
    compute = _mean([r.inside.compute_ns / max(1, r.inside.window_ns) for r in ranks])
    return Health(
        steps=max(len(r.steps) for r in ranks),
        step_ns=_mean([r.per_step(r.inside.window_ns) for r in ranks]),
        compute=compute,
        idle_ns=_mean([r.per_step(r.inside.idle_ns) for r in ranks]),
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
    transfers = transfers_of(summary)
    losses = [losses_of(*pair, limits) for pair in zip(ranks, transfers, strict=True)]
    found: list[Verdict] = []
    if joined is not None:
        found += _straggler(summary, joined, losses, limits)
    found += _late(ranks, losses)
    found += _serialised(ranks, losses)
    found += _small(ranks, losses, limits)
    found += _slow(summary, losses, limits, cluster)
    found += _idle(ranks)
    found += _copies(ranks)
    if cluster is not None:
        found += _matmul(ranks, limits, cluster)
    least = limits.least * health.step_ns
    return sorted((v for v in found if v.saves_ns >= least), key=lambda v: -v.saves_ns)


def transfers_of(summary: Summary) -> list[Ints | None]:
    """Of each rank the transfer of each call, where ranks could be joined."""
    if summary.joined is None:
        return [None] * len(summary.ranks)
    return [*summary.joined.transfers_of([len(rank.calls) for rank in summary.ranks])]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _ms(nanoseconds: float) -> str:
    value = nanoseconds / _MILLISECOND
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 0.95 else (
        f"{value:.3f} ms")  # fmt: skip


def _lost(nanoseconds: float, ranks: list[RankSummary]) -> str:
    steps = any(rank.steps for rank in ranks)
    return f"{_ms(nanoseconds)} of {'each step' if steps else 'the trace'}"


def _straggler(
    summary: Summary, joined: Joined, losses: list[Losses], limits: Thresholds
) -> list[Verdict]:
    found = straggler_of(summary, joined, losses, limits)
    if found is None:
        return _turns(summary, joined, losses)
    lost = _lost(found.caused_ns, summary.ranks)
    return [
        Verdict(
            cause="straggler",
            saves_ns=found.caused_ns,
            statement=f"{_names(found)} the others waiting, {lost}",
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
    pairs = zip(summary.ranks, losses, strict=True)
    waiting = _mean([rank.per_step(int(loss.waiting_ns.sum())) for rank, loss in pairs])
    late = joined.last_to_arrive()
    worst = int(late.argmax())
    return [
        Verdict(
            cause="ranks out of step",
            saves_ns=waiting,
            statement=f"Ranks wait for each other in turn, {_lost(waiting, summary.ranks)}",
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


def _late(ranks: list[RankSummary], losses: list[Losses]) -> list[Verdict]:
    saves = _mean([r.per_step(int(x.late_ns.sum())) for r, x in zip(ranks, losses, strict=True)])
    rank, loss = max(zip(ranks, losses, strict=True), key=lambda pair: int(pair[1].late_ns.sum()))
    late = np.flatnonzero(loss.late_ns)
    if not len(late):
        return []
    backward = [i for i in late.tolist() if rank.places[i].role == GATHER_BACKWARD]
    units = {rank.places[i].unit for i in late.tolist()} - {""}
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
            statement=f"Gathers start too late: {_lost(saves, ranks)}",
            evidence=f"{len(late)} gathers{where}{when} began only after compute that had no "
            "collective beside it",
            change=change,
        )
    ]


def _serialised(ranks: list[RankSummary], losses: list[Losses]) -> list[Verdict]:
    pairs = list(zip(ranks, losses, strict=True))
    saves = _mean([r.per_step(int(x.serialised_ns.sum())) for r, x in pairs])
    calls = max(int((x.serialised_ns > 0).sum()) for x in losses)
    if not calls:
        return []
    return [
        Verdict(
            cause="gather and reduce-scatter serialised",
            saves_ns=saves,
            statement=f"Gathers stand behind reduce-scatters: {_lost(saves, ranks)}",
            evidence=f"{calls} gathers were asked for while a reduce-scatter ran, and began when "
            "it ended",
            change="give reductions a communicator of their own: "
            "model.set_separate_reduce_scatter_group()",
        )
    ]


def _small(ranks: list[RankSummary], losses: list[Losses], limits: Thresholds) -> list[Verdict]:
    pairs = list(zip(ranks, losses, strict=True))
    saves = _mean([r.per_step(int(x.small_ns.sum())) for r, x in pairs])
    rank, loss = max(pairs, key=lambda pair: int(pair[1].small_ns.sum()))
    mine = np.flatnonzero(loss.small_ns)
    if not len(mine):
        return []
    size = float(np.median(rank.calls.moved_bytes[mine]))
    return [
        Verdict(
            cause="small messages",
            saves_ns=saves,
            statement=f"Messages are too small for their latency: {_lost(saves, ranks)}",
            evidence=f"{len(mine)} of {len(rank.calls)} collectives move less than "
            f"{write_bytes(limits.small_message)}, half of those less than {show_gb(size)}",
            change="put more blocks into a unit (strategy.blocks_per_unit), or larger DDP buckets",
        )
    ]


def _slow(
    summary: Summary, losses: list[Losses], limits: Thresholds, cluster: ClusterSpec | None
) -> list[Verdict]:
    """What is left of the exposed time, by operation: the link, or too little to hide behind."""
    found = []
    ranks = summary.ranks
    operations = sorted({op for rank in ranks for op in rank.calls.operation})
    for operation in operations:
        saves = exposed = 0.0
        for rank, loss in zip(ranks, losses, strict=True):
            mine = np.asarray(rank.calls.operation) == operation
            exposed += rank.per_step(int(loss.slow_ns[mine].sum())) / len(ranks)
        saves = exposed
        share = _reached(summary, operation, cluster)
        if share is not None and share < limits.link:
            saves = exposed * (1 - share / limits.link)
            found.append(
                Verdict(
                    cause="slow link",
                    saves_ns=saves,
                    statement=f"The link is slow in {operation}: {_lost(saves, ranks)}",
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
                statement=f"{_capital(operation)} has no compute to hide behind: "
                f"{_lost(exposed, ranks)}",
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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


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


_IDLE = {
    "data_ns": (
        "data loader",
        "The device waits for data",
        "more workers or prefetch in the data loader; tokenize beforehand",
    ),
    "allocator_ns": (
        "allocator",
        "The allocator asks the driver for memory",
        "leave memory free, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    "rate_limiter_ns": (
        "rate limiter",
        "FSDP's rate limiter holds the host",
        "limit_all_gathers=False in FSDP1, or fully_shard, which needs no limiter",
    ),
    "synchronisation_ns": (
        "synchronisation",
        "The host waits for the device and lets it run dry",
        "read losses less often: .item(), .cpu() and print() of a tensor wait for all before it",
    ),
    "launch_ns": (
        "host-bound launches",
        "The device waits for launches",
        "torch.compile, larger micro-batches, fused optimizers",
    ),
    "unexplained_ns": (
        "unexplained idle",
        "The device is idle, and the trace does not tell why",
        "profile the other ranks too, and with CUDA activities",
    ),
}


def _idle(ranks: list[RankSummary]) -> list[Verdict]:
    found = []
    for field, (cause, statement, change) in _IDLE.items():
        saves = _mean([r.per_step(getattr(r.host.idle, field)) for r in ranks])
        worst = max(ranks, key=lambda r, f=field: getattr(r.host.idle, f))  # type: ignore[misc]
        if saves:
            told = "The process waits for data" if field == "data_ns" and worst.on_cpu else (
                "Python keeps the CPU from computing" if worst.on_cpu else statement)  # fmt: skip
            found.append(
                Verdict(cause, saves, f"{told}: {_lost(saves, ranks)}", _why(worst, field),
                        change)
            )  # fmt: skip
    return found


def _why(rank: RankSummary, field: str) -> str:
    host = rank.host
    steps, where = max(1, len(rank.steps)), "a step" if rank.steps else "in the trace"
    if field == "data_ns":
        return f"{_ms(rank.per_step(host.data_ns))} {where} in the data loader of {rank.name}"
    if field == "allocator_ns":
        return f"{host.allocator_calls / steps:,.0f} allocations and frees {where}"
    if field == "synchronisation_ns":
        by = f", most in {host.synchronised_by}" if host.synchronised_by else ""
        return f"{host.synchronisations / steps:,.0f} synchronisations {where}{by}"
    if field == "launch_ns" and rank.on_cpu:
        return "no operation runs on any thread, and no collective either"
    return {
        "launch_ns": "nothing was queued when the device ran dry",
        "unexplained_ns": "what ran next had been launched, or its launch is not in the trace",
    }.get(field, f"in {rank.name}")


def _copies(ranks: list[RankSummary]) -> list[Verdict]:
    saves = _mean([r.per_step(r.inside.exposed_copy_ns) for r in ranks])
    if not saves:
        return []
    on_cpu = any(r.on_cpu for r in ranks)
    return [
        Verdict(
            cause="exposed copies",
            saves_ns=saves,
            statement=f"Copies run alone: {_lost(saves, ranks)}",
            evidence="packing and unpacking around collectives"
            if on_cpu
            else "copies between host and device, or within it, with nothing beside them",
            change="fewer and larger units pack less often"
            if on_cpu
            else "pin_memory=True and non_blocking=True for inputs; no .cpu() in the loop",
        )
    ]


def _matmul(ranks: list[RankSummary], limits: Thresholds, cluster: ClusterSpec) -> list[Verdict]:
    known = [(r, r.matmul) for r in ranks if r.matmul is not None]
    if not known:
        return []
    rank, worst = min(known, key=lambda pair: pair[1].flops_per_s)
    peak = cluster.device.peak_flops(worst.dtype)
    if not peak or worst.flops_per_s >= limits.matmul * peak:
        return []
    share = worst.flops_per_s / peak
    saves = rank.per_step(worst.time_ns) * (1 - share / limits.matmul)
    return [
        Verdict(
            cause="low matmul efficiency",
            saves_ns=saves,
            statement=f"Matrix products are slow: {_lost(saves, ranks)}",
            evidence=f"{worst.calls} products in {worst.dtype} reach {share:.0%} of "
            f"{cluster.device.name}'s peak",
            change="larger micro-batches, sizes that are multiples of 64, bf16 where it is fp32",
        )
    ]
