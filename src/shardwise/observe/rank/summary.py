"""What one trace says: where its time went, by step, collective, unit and micro-batch."""

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
    unrecognised,
)
from shardwise.observe.rank.exposure import Exposed, exposed_pieces, free_before
from shardwise.observe.rank.host import Host, host_of
from shardwise.observe.rank.matmul import Matmul, matmul_of
from shardwise.observe.rank.micro_batches import MicroBatches, micro_batches_of
from shardwise.observe.rank.slowdown import Slowdown, slowdown_of
from shardwise.observe.rank.units import Place, UnitTime, places_of, unit_times
from shardwise.observe.rules import Rules
from shardwise.spec.record import SpecError
from shardwise.timeline.breakdown import Breakdown, breakdown
from shardwise.timeline.spans import Timeline


class RankSummary(NamedTuple):
    """One trace. Figures are of a device, or of the threads of a process on a CPU."""

    path: Path
    rank: int | None
    world_size: int | None
    on_cpu: bool
    # The whole trace, and the part from the first profiled step to the last.
    whole: Breakdown
    span: tuple[int, int]
    inside: Breakdown
    # Profiled steps, where they were marked: from when to when, and what they consist of.
    windows: list[tuple[int, int]]
    steps: list[Breakdown]
    calls: Calls
    exposed: Exposed
    # Of each call: compute that ran right before it while no collective did.
    free_ns: Ints
    # Of each call: the FSDP unit it serves.
    places: list[Place]
    collectives: list[CollectiveTime]
    # Empty where FSDP2 left no annotations.
    units: list[UnitTime]
    # Empty where all are of one kind.
    micro_batches: list[MicroBatches]
    host: Host
    matmul: Matmul | None
    slowdown: Slowdown | None
    problems: list[str]
    # Only where asked for: it is larger than all the rest.
    timeline: Timeline | None

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else self.path.name

    def per_step(self, nanoseconds: float) -> float:
        return nanoseconds / max(1, len(self.steps))


def summarise_rank(
    path: Path, rules: Rules | None = None, *, timeline: bool = False, cache: Path | None = None
) -> RankSummary:
    """Read one trace."""
    trace = cached_trace(path, cache)
    on_cpu = not on_device(trace).any()
    lanes = host_timeline(trace) if on_cpu else device_timeline(trace, rules)
    if not len(lanes):
        raise SpecError(f"trace: nothing in {trace.path} tells what a device or thread did")
    windows = _steps(trace, lanes)
    span = (windows[0][0], max(end for _, end in windows)) if windows else lanes.window
    calls = calls_of(trace, lanes)
    compute = lanes.covered("compute")
    exposed = exposed_pieces(calls, compute, span)
    places = places_of(trace, calls)
    return RankSummary(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        on_cpu=on_cpu,
        whole=breakdown(lanes),
        span=span,
        inside=breakdown(lanes, span),
        windows=windows,
        steps=[breakdown(lanes, window) for window in windows],
        calls=calls,
        exposed=exposed,
        free_ns=free_before(calls, compute),
        places=places,
        collectives=by_operation(calls, compute),
        units=unit_times(trace, lanes, calls, places),
        micro_batches=micro_batches_of(trace, calls, exposed, places),
        host=host_of(trace, lanes, span, windows),
        matmul=matmul_of(trace, lanes, span),
        slowdown=slowdown_of(lanes),
        problems=_problems(trace, lanes, on_cpu),
        timeline=lanes if timeline else None,
    )


def _problems(trace: Trace, timeline: Timeline, on_cpu: bool) -> list[str]:
    problems = list(trace.problems)
    world = trace.world_size
    if world is not None and world > 1 and not timeline.of_kind("communication").any():
        problems.append(f"no communication is in it, though it is of {world} ranks")
    unknown = [] if on_cpu else unrecognised(trace, timeline)
    if unknown:
        problems.append(
            f"{len(unknown)} kinds of kernels run among collectives and count as compute, such as "
            f"{unknown[0][:40]!r}; --rules can say what they are"
        )
    return problems


def _steps(trace: Trace, timeline: Timeline) -> list[tuple[int, int]]:
    """Windows of the profiled steps: the device's, or the host's where those cover more."""
    begin, end = timeline.window
    found: list[tuple[int, int]] = []
    for category in ("gpu_user_annotation", "user_annotation", "Operator"):
        windows = {
            (int(trace.start_ns[row]), int(trace.end_ns[row]))
            for row in np.flatnonzero(trace.in_category(category)).tolist()
            if trace.texts[trace.name[row]].startswith("ProfilerStep")
        }
        inside = sorted((s, e) for s, e in windows if s < end and e > begin and e > s)
        if sum(e - s for s, e in inside) > 1.1 * sum(e - s for s, e in found):
            found = inside
    return found
