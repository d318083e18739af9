"""Summary of one rank's trace: time by step, collective, FSDP unit and micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.cache import cached_trace
from shardwise.observe.file.trace import Ints, Trace
from shardwise.observe.rank.calls import Calls, CollectiveTime, by_operation, calls_of
from shardwise.observe.rank.classify import (
    device_timeline,
    host_timeline,
    on_device,
    unrecognised_kernels,
)
from shardwise.observe.rank.experts import ExpertPasses, expert_passes
from shardwise.observe.rank.exposure import Exposed, exposed_pieces, overlappable_before
from shardwise.observe.rank.host import HostActivity, host_activity
from shardwise.observe.rank.matmul import Matmul, matmul_of
from shardwise.observe.rank.micro_batches import MicroBatches, micro_batches_of
from shardwise.observe.rank.slowdown import Slowdown, slowdown_of
from shardwise.observe.rank.units import Purpose, UnitTime, purposes_of, unit_times
from shardwise.observe.rules import Rules
from shardwise.spec.record import SpecError
from shardwise.step.breakdown import Breakdown, breakdown
from shardwise.step.spans import Timeline


class RankSummary(NamedTuple):
    """One rank: figures of its device, or of the threads of its process on a CPU.

    `collectives` and `units` are sums over the profiled steps; divide them with `per_step`.
    """

    path: Path
    rank: int | None
    world_size: int | None
    on_cpu: bool
    full_trace: Breakdown
    # From the first profiled step to the last; the full trace where no step is marked.
    span: tuple[int, int]
    profiled: Breakdown
    # Start and end of each marked step, and its breakdown.
    windows: list[tuple[int, int]]
    steps: list[Breakdown]
    calls: Calls
    exposed: Exposed
    # Per call: nanoseconds of compute right before it that could have hidden it.
    overlappable_ns: Ints
    # Per call: the FSDP unit it was issued for, and its role there.
    purposes: list[Purpose]
    # Passes of tokens through the rank's experts; none where the trace has no sizes.
    expert_passes: ExpertPasses
    collectives: list[CollectiveTime]
    # Empty without FSDP2 annotations.
    units: list[UnitTime]
    # Empty if all micro-batches are of one kind.
    micro_batches: list[MicroBatches]
    host: HostActivity
    matmul: Matmul | None
    slowdown: Slowdown | None
    problems: list[str]
    # None unless requested: it is larger than everything else.
    timeline: Timeline | None

    @property
    def name(self) -> str:
        """Name for screens: "rank 3", or the name of the file if the rank is not recorded."""
        return f"rank {self.rank}" if self.rank is not None else self.path.name

    def per_step(self, total: float) -> float:
        """Average over the profiled steps; the total itself where no step is marked."""
        return total / max(1, len(self.steps))


def summarise_rank(
    path: Path, rules: Rules | None = None, *, timeline: bool = False, cache: Path | None = None
) -> RankSummary:
    """Read and summarise one trace.

    `timeline` keeps the timeline in the summary; `cache` is a folder of parsed traces.
    """
    trace = cached_trace(path, cache)
    on_cpu = not on_device(trace).any()
    lanes = host_timeline(trace) if on_cpu else device_timeline(trace, rules)
    if not len(lanes):
        raise SpecError(
            f"trace: {trace.path} has no GPU kernels and no CPU operations; profile with "
            "ProfilerActivity.CPU and ProfilerActivity.CUDA"
        )
    windows = _steps(trace, lanes)
    span = (windows[0][0], max(end for _, end in windows)) if windows else lanes.window
    calls = calls_of(trace, lanes)
    compute = lanes.covered("compute")
    exposed = exposed_pieces(calls, compute, span)
    exposed_ns = exposed.per_call(len(calls))
    purposes = purposes_of(trace, calls)
    return RankSummary(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        on_cpu=on_cpu,
        full_trace=breakdown(lanes),
        span=span,
        profiled=breakdown(lanes, span),
        windows=windows,
        steps=[breakdown(lanes, window) for window in windows],
        calls=calls,
        exposed=exposed,
        overlappable_ns=overlappable_before(calls, compute),
        purposes=purposes,
        expert_passes=expert_passes(calls, compute),
        collectives=by_operation(calls, exposed_ns, span),
        units=unit_times(trace, lanes, calls, purposes, exposed_ns, span),
        micro_batches=micro_batches_of(trace, calls, exposed, purposes),
        host=host_activity(trace, lanes, span, windows),
        matmul=matmul_of(trace, lanes, span),
        slowdown=slowdown_of(lanes),
        problems=_problems(trace, lanes, on_cpu),
        timeline=lanes if timeline else None,
    )


def _problems(trace: Trace, timeline: Timeline, on_cpu: bool) -> list[str]:
    """Sentences on what a trace lacks, or what could not be read or classified."""
    problems = list(trace.problems)
    world = trace.world_size
    if world is not None and world > 1 and not timeline.of_kind("communication").any():
        problems.append(f"no communication was recorded, although the run has {world} ranks")
    unknown = [] if on_cpu else unrecognised_kernels(trace, timeline)
    if unknown:
        problems.append(
            f"{len(unknown)} kernel names on communication streams count as compute, for example "
            f"{unknown[0][:40]!r}; classify them with --rules"
        )
    return problems


def _steps(trace: Trace, timeline: Timeline) -> list[tuple[int, int]]:
    """Start and end of each profiled step, in nanoseconds; empty if no step is marked.

    Marks on the device are used, or marks on the host if these cover more time.
    """
    begin, end = timeline.window
    steps: list[tuple[int, int]] = []
    for category in ("gpu_user_annotation", "user_annotation", "Operator"):
        windows = {
            (int(trace.start_ns[row]), int(trace.end_ns[row]))
            for row in np.flatnonzero(trace.in_category(category)).tolist()
            if trace.texts[trace.name[row]].startswith("ProfilerStep")
        }
        inside = sorted((s, e) for s, e in windows if s < end and e > begin and e > s)
        if sum(e - s for s, e in inside) > 1.1 * sum(e - s for s, e in steps):
            steps = inside
    return steps
