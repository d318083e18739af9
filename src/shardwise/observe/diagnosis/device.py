"""Verdicts on a device that idles, copies, or computes slowly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.observe.diagnosis.verdict import Verdict, count, duration, mean, plural
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rules import Thresholds
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DType
from shardwise.step.words import percent

IdleCause = Literal["data_loading", "allocator", "rate_limiter", "synchronisation", "launch_bound",
                    "unexplained_idle"]  # fmt: skip

# The field of Idle that measures each cause.
IDLE_FIELDS: dict[IdleCause, str] = {
    "data_loading": "data_ns",
    "allocator": "allocator_ns",
    "rate_limiter": "rate_limiter_ns",
    "synchronisation": "synchronisation_ns",
    "launch_bound": "launch_ns",
    "unexplained_idle": "unexplained_ns",
}
_IDLE_TITLES: dict[IdleCause, str] = {
    "data_loading": "GPU idle, waiting for data",
    "allocator": "GPU idle while the allocator requests memory",
    "rate_limiter": "GPU idle, host held by FSDP's rate limiter",
    "synchronisation": "GPU idle after the host waited for it",
    "launch_bound": "GPU idle, waiting for kernel launches",
    "unexplained_idle": "GPU idle, reason unknown",
}
_IDLE_FIXES: dict[IdleCause, str] = {
    "data_loading": "more workers or prefetching in the data loader; tokenize beforehand",
    "allocator": "leave more memory free, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "rate_limiter": "limit_all_gathers=False in FSDP1, or FSDP2, which has no rate limiter",
    "synchronisation": "read losses less often: .item(), .cpu() and print() of a tensor make the "
    "host wait for the GPU",
    "launch_bound": "torch.compile, larger micro-batches, fused optimizers",
    "unexplained_idle": "profile all ranks, with ProfilerActivity.CPU and ProfilerActivity.CUDA",
}


@dataclass(frozen=True, kw_only=True)
class IdleDevice(Verdict):
    """Idle time of one cause; counts and times are those of the rank that loses most by it."""

    cause: IdleCause
    rank: str
    on_cpu: bool
    # Allocator calls or synchronisations per step, where these are the cause; else None.
    calls: float | None = None
    synchronised_by: str = ""
    data_loading_ns: float | None = None

    @property
    def title(self) -> str:
        if not self.on_cpu:
            return _IDLE_TITLES[self.cause]
        loading = self.cause == "data_loading"
        return "Process idle, waiting for data" if loading else "CPU idle in Python code"

    def evidence(self, period: str) -> str:
        calls = count(self.calls or 0)
        by = f", most of them in {self.synchronised_by}" if self.synchronised_by else ""
        loading = duration(self.data_loading_ns or 0.0)
        evidence: dict[IdleCause, str] = {
            "data_loading": f"The data loader of {self.rank} takes {loading} {period}",
            "allocator": f"{calls} calls of cudaMalloc or cudaFree {period} on {self.rank}",
            "rate_limiter": f"Longest on {self.rank}",
            "synchronisation": f"{calls} synchronisations {period} on {self.rank}{by}",
            "launch_bound": "Neither an operation nor a collective runs on any thread"
            if self.on_cpu
            else "The GPU ran out of work because the host had queued none; longest on "
            f"{self.rank}",
            "unexplained_idle": "The next kernel was already launched, or its launch is not "
            "recorded",
        }
        return evidence[self.cause]

    @property
    def fix(self) -> str:
        return _IDLE_FIXES[self.cause]


@dataclass(frozen=True, kw_only=True)
class ExposedCopies(Verdict):
    """Copies with neither compute nor communication at the same time."""

    cause: Literal["exposed_copies"] = "exposed_copies"
    on_cpu: bool

    title = "Exposed copies"

    def evidence(self, period: str) -> str:
        if self.on_cpu:
            return "Packing and unpacking around collectives, with no compute at the same time"
        return "Copies between host and GPU, or within the GPU, with nothing else running"

    @property
    def fix(self) -> str:
        if self.on_cpu:
            return "fewer and larger FSDP units (strategy.blocks_per_unit)"
        return "pin_memory=True and non_blocking=True for inputs; no .cpu() in the training loop"


@dataclass(frozen=True, kw_only=True)
class SlowMatmuls(Verdict):
    """Matmuls that reach only a share of the device's peak."""

    cause: Literal["slow_matmuls"] = "slow_matmuls"
    calls: float
    dtype: DType
    device: str
    reached_share: float

    title = "Slow matmuls"
    fix = "larger micro-batches, sizes that are multiples of 64, bf16 instead of fp32"

    def evidence(self, period: str) -> str:
        return (
            f"{plural(self.calls, f'{self.dtype} matmul')} {period} reach "
            f"{percent(self.reached_share)} of {self.device}'s peak"
        )


# ---- find the verdicts of a run --------------------------------------------------------------


def idle_verdicts(ranks: list[RankSummary]) -> Iterator[Verdict]:
    """Yield a verdict per cause of idle time."""
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


def copy_verdicts(ranks: list[RankSummary]) -> Iterator[Verdict]:
    """Yield a verdict on copies that nothing overlaps with, if there are any."""
    saves = mean([rank.per_step(rank.profiled.exposed_copy_ns) for rank in ranks])
    if saves:
        yield ExposedCopies(saves_ns=saves, on_cpu=any(rank.on_cpu for rank in ranks))


def matmul_verdicts(
    ranks: list[RankSummary], limits: Thresholds, cluster: ClusterSpec
) -> Iterator[Verdict]:
    """Yield a verdict if the slowest rank's matmuls stay below the expected share of the peak."""
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
