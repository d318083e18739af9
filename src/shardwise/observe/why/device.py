"""Verdicts on a device that idles, copies, or computes slowly."""

from __future__ import annotations

from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rules import Thresholds
from shardwise.observe.why.verdict import Verdict, lost, mean, ms
from shardwise.spec.cluster import ClusterSpec

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


def idle(ranks: list[RankSummary]) -> list[Verdict]:
    found = []
    for field, (cause, statement, change) in _IDLE.items():
        saves = mean([r.per_step(getattr(r.host.idle, field)) for r in ranks])
        worst = max(ranks, key=lambda r, f=field: getattr(r.host.idle, f))  # type: ignore[misc]
        if saves:
            told = "The process waits for data" if field == "data_ns" and worst.on_cpu else (
                "Python keeps the CPU from computing" if worst.on_cpu else statement)  # fmt: skip
            found.append(
                Verdict(cause, saves, f"{told}: {lost(saves, ranks)}", _why(worst, field),
                        change)
            )  # fmt: skip
    return found


def _why(rank: RankSummary, field: str) -> str:
    host = rank.host
    steps, where = max(1, len(rank.steps)), "a step" if rank.steps else "in the trace"
    if field == "data_ns":
        return f"{ms(rank.per_step(host.data_ns))} {where} in the data loader of {rank.name}"
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


def copies(ranks: list[RankSummary]) -> list[Verdict]:
    saves = mean([r.per_step(r.inside.exposed_copy_ns) for r in ranks])
    if not saves:
        return []
    on_cpu = any(r.on_cpu for r in ranks)
    return [
        Verdict(
            cause="exposed copies",
            saves_ns=saves,
            statement=f"Copies run alone: {lost(saves, ranks)}",
            evidence="packing and unpacking around collectives"
            if on_cpu
            else "copies between host and device, or within it, with nothing beside them",
            change="fewer and larger units pack less often"
            if on_cpu
            else "pin_memory=True and non_blocking=True for inputs; no .cpu() in the loop",
        )
    ]


def products(ranks: list[RankSummary], limits: Thresholds, cluster: ClusterSpec) -> list[Verdict]:
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
            statement=f"Matrix products are slow: {lost(saves, ranks)}",
            evidence=f"{worst.calls} products in {worst.dtype} reach {share:.0%} of "
            f"{cluster.device.name}'s peak",
            change="larger micro-batches, sizes that are multiples of 64, bf16 where it is fp32",
        )
    ]
