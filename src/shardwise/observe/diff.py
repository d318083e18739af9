"""Compare two traces by kernel: added, removed, slower and faster beyond noise.

Times are per step. Noise is the spread between the steps of a trace; with a single step it is
unknown, and a share of the step is used instead.
"""

from __future__ import annotations

import re
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from shardwise.observe.rank.summary import RankSummary
from shardwise.timeline.spans import KINDS

Change = Literal["added", "removed", "slower", "faster", "same"]
# Differences below this share of a step are never reported.
MIN_CHANGE = 0.005
# A step that is longer by this share is a regression, if it is beyond noise too.
REGRESSION = 0.03
_DETAILS = re.compile(r"\(.*|\bvoid ")


class Side(NamedTuple):
    """One kernel in one trace: calls and nanoseconds per step, and their spread between steps."""

    calls: float
    step_ns: float
    spread_ns: float


class Difference(NamedTuple):
    """One kernel in both traces."""

    name: str
    kind: str
    change: Change
    before: Side
    after: Side

    @property
    def delta_ns(self) -> float:
        return self.after.step_ns - self.before.step_ns


class Diff(NamedTuple):
    """The step of both traces, and every kernel, the largest difference first."""

    before: Side
    after: Side
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
    """Compare two ranks, read with their timelines."""
    one, other = _by_name(before), _by_name(after)
    steps = [_side([(1, s.window_ns) for s in r.steps or [r.full_trace]]) for r in (before, after)]
    smallest = MIN_CHANGE * max(side.step_ns for side in steps)
    absent = Side(0.0, 0.0, 0.0)
    differences = []
    for name, kind in sorted({*one, *other}):
        was, now = one.get((name, kind), absent), other.get((name, kind), absent)
        noise = max(was.spread_ns, now.spread_ns, smallest)
        differences.append(Difference(name, kind, _change(was, now, noise), was, now))
    differences.sort(key=lambda d: -abs(d.delta_ns))
    longer = steps[1].step_ns - steps[0].step_ns
    noise = max(*(side.spread_ns for side in steps), REGRESSION * steps[0].step_ns)
    return Diff(steps[0], steps[1], differences, longer > noise)


def _change(was: Side, now: Side, noise: float) -> Change:
    if not was.calls:
        return "added"
    if not now.calls:
        return "removed"
    if abs(now.step_ns - was.step_ns) <= noise:
        return "same"
    return "slower" if now.step_ns > was.step_ns else "faster"


def _side(steps: list[tuple[float, float]]) -> Side:
    calls, times = zip(*steps, strict=True)
    typical = median(times)
    # Two standard deviations, estimated from the median distance: robust to one slow step.
    spread = 2 * 1.4826 * median(abs(time - typical) for time in times)
    return Side(median(calls), typical, spread)


def _by_name(rank: RankSummary) -> dict[tuple[str, str], Side]:
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
    return {key: _side(values) for key, values in steps.items()}
