"""Compare two traces: where the time of a step went, then its kernels, beyond noise.

The parts of a step are compute, exposed communication and copies, and idle time by what the host
did; they sum to it. Kernels are added, removed, slower or faster. Times are per step. Noise is the
spread between the steps of a trace; with a single step it is unknown, and a share of the step is
used instead.
"""

from __future__ import annotations

import re
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from shardwise.observe.diagnosis.device import IDLE_FIELDS, IdleCause
from shardwise.observe.rank.summary import RankSummary
from shardwise.step.spans import KINDS

Change = Literal["added", "removed", "slower", "faster", "same"]
# Differences below this share of a step are never reported.
MIN_CHANGE = 0.005
# A step that is longer by this share is a regression, if it is beyond noise too.
REGRESSION = 0.03
StepPart = Literal["compute", "exposed_communication", "exposed_copies", IdleCause]
_DETAILS = re.compile(r"\(.*|\bvoid ")


class KernelTiming(NamedTuple):
    """One kernel, or the step itself, in one trace: median calls and nanoseconds per step.

    `spread_ns` is the noise of the nanoseconds between steps: two robust standard deviations.
    """

    calls: float
    step_ns: float
    spread_ns: float


class Difference(NamedTuple):
    """One kernel in both traces; `kind` is "compute", "communication" or "copy"."""

    name: str
    kind: str
    change: Change
    before: KernelTiming
    after: KernelTiming

    @property
    def delta_ns(self) -> float:
        """Nanoseconds per step that the kernel takes longer in the second trace."""
        return self.after.step_ns - self.before.step_ns


class PartChange(NamedTuple):
    """A part of the average step in both traces; differences up to `noise_ns` are noise."""

    part: StepPart
    before_ns: float
    after_ns: float
    noise_ns: float

    @property
    def delta_ns(self) -> float:
        """Nanoseconds that the part takes longer in the second trace."""
        return self.after_ns - self.before_ns

    @property
    def changed(self) -> bool:
        """Whether the difference exceeds the noise."""
        return abs(self.delta_ns) > self.noise_ns


class Diff(NamedTuple):
    """The step of both traces, its parts and every kernel, the largest difference first.

    `regressed` says whether the second step is longer, beyond noise and by at least 3%.
    """

    before: KernelTiming
    after: KernelTiming
    parts: list[PartChange]
    differences: list[Difference]
    regressed: bool


def short_name(text: str) -> str:
    """A kernel name without arguments and template parameters."""
    text = _DETAILS.sub("", text)
    while True:
        shorter = re.sub(r"<[^<>]*>", "", text)
        if shorter == text:
            return text.strip() or "unnamed"
        text = shorter


def compare(before: RankSummary, after: RankSummary) -> Diff:
    """Compare two rank summaries that were read with their timelines."""
    one, other = _by_name(before), _by_name(after)
    steps = [
        _timing_of([(1, s.window_ns) for s in r.steps or [r.full_trace]]) for r in (before, after)
    ]
    smallest = MIN_CHANGE * max(side.step_ns for side in steps)
    absent = KernelTiming(0.0, 0.0, 0.0)
    differences = []
    for name, kind in sorted({*one, *other}):
        was, now = one.get((name, kind), absent), other.get((name, kind), absent)
        noise = max(was.spread_ns, now.spread_ns, smallest)
        differences.append(Difference(name, kind, _change(was, now, noise), was, now))
    differences.sort(key=lambda d: -abs(d.delta_ns))
    longer = steps[1].step_ns - steps[0].step_ns
    noise = max(*(side.spread_ns for side in steps), REGRESSION * steps[0].step_ns)
    parts = _part_changes(before, after, smallest)
    return Diff(steps[0], steps[1], parts, differences, longer > noise)


def _part_changes(before: RankSummary, after: RankSummary, smallest: float) -> list[PartChange]:
    """Each part of the step before and after, the largest difference first.

    Differences below `smallest` nanoseconds always count as noise.
    """
    fields: dict[StepPart, str] = {
        "compute": "compute_ns",
        "exposed_communication": "exposed_communication_ns",
        "exposed_copies": "exposed_copy_ns",
    }
    parts = []
    for part, field in fields.items():
        was, now = (rank.per_step(getattr(rank.profiled, field)) for rank in (before, after))
        noise = max(smallest, _spread(before, field), _spread(after, field))
        parts.append(PartChange(part, was, now, noise))
    # Idle time by cause is not known per step: use the noise of all idle time.
    noise = max(smallest, _spread(before, "idle_ns"), _spread(after, "idle_ns"))
    for cause, field in IDLE_FIELDS.items():
        was, now = (rank.per_step(getattr(rank.host.idle, field)) for rank in (before, after))
        parts.append(PartChange(cause, was, now, noise))
    return sorted(parts, key=lambda part: -abs(part.delta_ns))


def _spread(rank: RankSummary, field: str) -> float:
    """Noise between steps of a `Breakdown` field, in nanoseconds; 0 if there is only one step."""
    return _timing_of(
        [(1, getattr(step, field)) for step in rank.steps or [rank.full_trace]]
    ).spread_ns


def _change(was: KernelTiming, now: KernelTiming, noise: float) -> Change:
    """How a kernel changed; a difference of at most `noise` nanoseconds is "same"."""
    if not was.calls:
        return "added"
    if not now.calls:
        return "removed"
    if abs(now.step_ns - was.step_ns) <= noise:
        return "same"
    return "slower" if now.step_ns > was.step_ns else "faster"


def _timing_of(steps: list[tuple[float, float]]) -> KernelTiming:
    """Median calls and nanoseconds of steps, and their spread; `steps` has a pair per step."""
    calls, times = zip(*steps, strict=True)
    typical = median(times)
    # Two standard deviations, estimated from the median distance: robust to one slow step.
    spread = 2 * 1.4826 * median(abs(time - typical) for time in times)
    return KernelTiming(median(calls), typical, spread)


def _by_name(rank: RankSummary) -> dict[tuple[str, str], KernelTiming]:
    """Calls and nanoseconds per step of each kernel of a rank, by short name and kind."""
    timeline = rank.timeline
    assert timeline is not None  # summarise(..., timelines=True)
    windows = [(s, e) for s, e in rank.windows] or [timeline.window]
    names = {code: short_name(timeline.names[code]) for code in np.unique(timeline.name).tolist()}
    durations = timeline.end_ns - timeline.start_ns
    steps: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, (begin, end) in enumerate(windows):
        inside = np.flatnonzero((timeline.start_ns >= begin) & (timeline.start_ns < end))
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for row in inside.tolist():
            key = (names[int(timeline.name[row])], str(KINDS[int(timeline.kind[row])]))
            calls, total = sums.get(key, (0, 0))
            sums[key] = (calls + 1, total + int(durations[row]))
        for key, (calls, total) in sums.items():
            steps.setdefault(key, [(0.0, 0.0)] * len(windows))[number] = (calls, total)
    return {key: _timing_of(values) for key, values in steps.items()}
