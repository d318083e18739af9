"""Verdicts of a trace in words: the result, its evidence and a suggested fix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import TYPE_CHECKING, NamedTuple

from shardwise.observe.diagnosis.verdict import (
    ExposedCommunication,
    ExposedCopies,
    IdleCause,
    IdleDevice,
    LateGathers,
    LateRank,
    QueuedGathers,
    RanksOutOfStep,
    SlowLink,
    SlowMatmuls,
    SmallMessages,
    Straggler,
    StragglerReason,
    Verdict,
)
from shardwise.spec.quantity import show_gb, write_bytes
from shardwise.step.words import MILLISECOND, percent

if TYPE_CHECKING:
    from shardwise.observe.diagnosis.verdicts import Health

OVERLAPPING = "Savings overlap; do not add them."


class Explanation(NamedTuple):
    """A verdict in words. `title` is a noun phrase, the others are complete sentences."""

    title: str
    result: str
    evidence: str
    fix: str


class _Words(NamedTuple):
    """What differs from cause to cause; none of the texts ends with a full stop."""

    title: str
    evidence: str
    fix: str


def explain(verdict: Verdict, health: Health) -> Explanation:
    """Word one verdict; `health` tells the length of a step."""
    period = "per step" if health.steps else "in the trace"
    words = _words(verdict, period)
    lost = f"{duration(verdict.saves_ns)} {period} ({percent(_share(verdict, health))})"
    result = f"{words.title}: {lost}."
    if isinstance(verdict, Straggler):
        verb = "delays" if len(verdict.ranks) == 1 else "delay"
        what = _delayed(verdict, health)
        share = percent(_share(verdict, health))
        result = f"{words.title} {verb} {what} by {duration(verdict.saves_ns)} ({share})."
    return Explanation(words.title, result, f"{words.evidence}.", f"{words.fix}.")


def _delayed(verdict: Straggler, health: Health) -> str:
    if health.steps > 1:
        return "every step" if verdict.every_step else "the average step"
    return "the one traced step" if health.steps else "the run"


def health_words(health: Health) -> str:
    """The result where no verdict stands out."""
    share = percent(health.compute, 1)
    if health.healthy:
        return f"Healthy: compute takes {share} of the time."
    return f"No dominant cause: compute takes {share} of the time."


def duration(nanoseconds: float) -> str:
    """Milliseconds with a unit and about three digits."""
    value = nanoseconds / MILLISECOND
    digits = 0 if value >= 99.95 else 1 if value >= 0.95 else 3 if value >= 0.0005 else 0
    return f"{value:,.{digits}f} ms"


def _share(verdict: Verdict, health: Health) -> float:
    return verdict.saves_ns / health.step_ns if health.step_ns else 0.0


def listed(names: Sequence[str]) -> str:
    """`rank 5`, `ranks 0 and 6`, `ranks 0, 3 and 6`."""
    if len(names) == 1:
        return names[0]
    numbers = [name.removeprefix("rank ") for name in names]
    start = "ranks " if all(name.startswith("rank ") for name in names) else ""
    return f"{start}{', '.join(numbers[:-1])} and {numbers[-1]}"


def capitalised(text: str) -> str:
    """With a capital first letter; the other letters stay as they are."""
    return text[:1].upper() + text[1:]


def count(number: float) -> str:
    """`7`, `81.5`, `1,200`: an average number of things."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def plural(number: float, noun: str) -> str:
    """`1 call`, `1,200 calls`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


@singledispatch
def _words(verdict: Verdict, period: str) -> _Words:
    raise TypeError(f"no words for {type(verdict).__name__}")


_STRAGGLER_FIXES: dict[StragglerReason, str] = {
    "data": "give the data loader{s} of {ranks} more workers, or check the disk",
    "compute": "check the GPU{s} of {ranks}: clocks, temperature, other jobs, longer sequences",
    "host": "check the host{s} of {ranks}: other processes, slow Python code, CPU clocks",
}


@_words.register
def _straggler(verdict: Straggler, period: str) -> _Words:
    late = sorted(verdict.late, key=lambda one: (len(one.name), one.name))
    reasons = list(dict.fromkeys(one.reason for one in late))
    alike = [[one for one in late if one.reason == reason] for reason in reasons]
    spent = ". ".join(_spent_words(group, verdict.on_cpu, period) for group in alike)
    names = listed([one.name for one in late])
    times = listed([f"{one.last_to_arrive:,}" for one in late])
    arrive = "It arrives" if len(late) == 1 else f"{capitalised(names)} arrive"
    fix = "; ".join(
        _STRAGGLER_FIXES[group[0].reason].format(
            ranks=listed([one.name for one in group]), s="s" if len(group) > 1 else ""
        )
        for group in alike
    )
    return _Words(
        f"Straggler{'' if len(late) == 1 else 's'}: {names}",
        f"{spent}. {arrive} last in {times} of {verdict.collectives:,} collectives with waiting",
        fix.replace("the GPU", "the CPU") if verdict.on_cpu else fix,
    )


def _spent_words(late: list[LateRank], on_cpu: bool, period: str) -> str:
    """What ranks that are late for one reason spend more time on than the others."""
    one, reason = len(late) == 1, late[0].reason
    names = capitalised(listed([rank.name for rank in late]))
    times = f"{listed([duration(rank.spent_ns) for rank in late])} {period}"
    if reason == "data":
        spent = f"{names} {'loads' if one else 'load'} data for {times}"
    elif reason == "compute":
        spent = f"{names} {'computes' if one else 'compute'} for {times}"
    elif on_cpu:
        spent = f"{names} {'runs' if one else 'run'} no operation for {times}"
    else:
        gpus = f"The GPU{' of' if one else 's of'} {listed([rank.name for rank in late])}"
        spent = f"{gpus} {'is' if one else 'are'} idle for {times} (nothing queued by the host)"
    return f"{spent}, other ranks for {duration(late[0].others_spent_ns)} (median)"


@_words.register
def _out_of_step(verdict: RanksOutOfStep, _: str) -> _Words:
    return _Words(
        "Ranks wait for each other",
        f"No single rank is consistently late: {verdict.latest_rank} arrives last most often, in "
        f"{verdict.last_to_arrive:,} of {verdict.collectives:,} collectives with waiting",
        "give every rank the same number of tokens, and every process its own CPU cores",
    )


@_words.register
def _late_gathers(verdict: LateGathers, period: str) -> _Words:
    units = f" of {plural(verdict.units, 'FSDP unit')}" if verdict.units else ""
    backward = f" ({count(verdict.backward_gathers)} in the backward)"
    return _Words(
        "All-gathers start too late",
        f"{plural(verdict.gathers, 'all-gather')}{units} {period}"
        f"{backward if verdict.backward_gathers else ''} start only after compute that could have "
        "hidden them",
        "none on a CPU, where FSDP2 waits for every all-gather; on GPUs it can prefetch"
        if verdict.on_cpu
        else "set strategy.prefetch and strategy.forward_prefetch to 1 or 2",
    )


@_words.register
def _queued_gathers(verdict: QueuedGathers, period: str) -> _Words:
    return _Words(
        "All-gathers queued behind reduce-scatters",
        f"{plural(verdict.gathers, 'all-gather')} {period} are issued while a reduce-scatter runs, "
        "and start only when it ends",
        "use a separate communicator for reductions: model.set_separate_reduce_scatter_group()",
    )


@_words.register
def _small_messages(verdict: SmallMessages, period: str) -> _Words:
    return _Words(
        "Latency of small messages",
        f"{count(verdict.calls)} of {count(verdict.all_calls)} collectives {period} are exposed "
        f"and move less than {write_bytes(verdict.limit_bytes)} "
        f"(median {show_gb(verdict.median_bytes)})",
        "group more blocks into an FSDP unit (strategy.blocks_per_unit), or use larger DDP buckets",
    )


@_words.register
def _slow_link(verdict: SlowLink, _: str) -> _Words:
    return _Words(
        f"Slow link in {verdict.operation}",
        f"Large messages reach {percent(verdict.reached_share)} of the link's bandwidth",
        "check the fabric: NCCL_DEBUG=INFO shows rings, GPUDirect and NICs; then run nccl-tests",
    )


_FEWER_BYTES = {
    "all-gather": "raise the micro-batch, shard within a node (hsdp), or keep parameters gathered "
    "after the forward (zero2)",
    "reduce-scatter": "raise the micro-batch or accumulate gradients: fewer bytes per token",
    "all-reduce": "raise the micro-batch or accumulate gradients: fewer bytes per token",
}


@_words.register
def _exposed(verdict: ExposedCommunication, period: str) -> _Words:
    evidence = (
        f"{plural(verdict.calls, 'call')} {period}; {percent(verdict.exposed_share)} of their time "
        "is not overlapped by compute"
    )
    if verdict.other_ranks_unknown:
        evidence += ". Part of it may be waiting: add the traces of the other ranks"
    return _Words(
        f"Exposed {verdict.operation}",
        evidence,
        _FEWER_BYTES.get(verdict.operation, "start it earlier, or move fewer bytes"),
    )


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


@_words.register
def _idle(verdict: IdleDevice, period: str) -> _Words:
    title = _IDLE_TITLES[verdict.cause]
    if verdict.on_cpu:
        loading = verdict.cause == "data_loading"
        title = "Process idle, waiting for data" if loading else "CPU idle in Python code"
    return _Words(title, _idle_evidence(verdict, period), _IDLE_FIXES[verdict.cause])


def _idle_evidence(verdict: IdleDevice, period: str) -> str:
    calls = count(verdict.calls or 0)
    by = f", most of them in {verdict.synchronised_by}" if verdict.synchronised_by else ""
    loading = duration(verdict.data_loading_ns or 0.0)
    evidence: dict[IdleCause, str] = {
        "data_loading": f"The data loader of {verdict.rank} takes {loading} {period}",
        "allocator": f"{calls} calls of cudaMalloc or cudaFree {period} on {verdict.rank}",
        "rate_limiter": f"Longest on {verdict.rank}",
        "synchronisation": f"{calls} synchronisations {period} on {verdict.rank}{by}",
        "launch_bound": "Neither an operation nor a collective runs on any thread"
        if verdict.on_cpu
        else f"The GPU ran out of work because the host had queued none; longest on {verdict.rank}",
        "unexplained_idle": "The next kernel was already launched, or its launch is not recorded",
    }
    return evidence[verdict.cause]


@_words.register
def _copies(verdict: ExposedCopies, _: str) -> _Words:
    if verdict.on_cpu:
        return _Words(
            "Exposed copies",
            "Packing and unpacking around collectives, with no compute at the same time",
            "fewer and larger FSDP units (strategy.blocks_per_unit)",
        )
    return _Words(
        "Exposed copies",
        "Copies between host and GPU, or within the GPU, with nothing else running",
        "pin_memory=True and non_blocking=True for inputs; no .cpu() in the training loop",
    )


@_words.register
def _matmuls(verdict: SlowMatmuls, period: str) -> _Words:
    return _Words(
        "Slow matmuls",
        f"{plural(verdict.calls, f'{verdict.dtype} matmul')} {period} reach "
        f"{percent(verdict.reached_share)} of {verdict.device}'s peak",
        "larger micro-batches, sizes that are multiples of 64, bf16 instead of fp32",
    )
