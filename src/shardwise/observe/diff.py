"""Two traces, kernel by kernel: what was added, removed, slower and faster, beyond noise.

Everything is per step. Noise is how far the steps of one trace lie apart; with one step nothing is
known of it, and a share of the step stands in.
"""

from __future__ import annotations

import re
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from shardwise.observe.rank.summary import RankSummary
from shardwise.timeline.spans import KINDS

Change = Literal["added", "removed", "slower", "faster", "same"]
# Below this share of a step no difference counts, whatever the spread.
LEAST = 0.005
# A step that is this much longer is a regression, if it is beyond the noise too.
REGRESSION = 0.03
_DETAILS = re.compile(r"\(.*|\bvoid ")


class Side(NamedTuple):
    """One kind of work in one trace: calls and nanoseconds of a step, and how far steps spread."""

    calls: float
    step_ns: float
    spread_ns: float


class Difference(NamedTuple):
    """One kind of work in both traces."""

    name: str
    kind: str
    change: Change
    before: Side
    after: Side

    @property
    def delta_ns(self) -> float:
        return self.after.step_ns - self.before.step_ns


class Diff(NamedTuple):
    """The steps of both traces, and every kind of work, the largest difference first."""

    before: Side
    after: Side
    differences: list[Difference]
    regressed: bool


def short_name(text: str) -> str:
    """A kernel's name without its arguments and templates."""
    text = _DETAILS.sub("", text)
    while True:
        shorter = re.sub(r"<[^<>]*>", "", text)
        if shorter == text:
            return text.strip() or "unnamed"
        text = shorter


def compare(before: RankSummary, after: RankSummary) -> Diff:
    """What changed from one trace to the other."""
    one, other = _by_name(before), _by_name(after)
    whole = [_side([(1, s.window_ns) for s in r.steps or [r.whole]]) for r in (before, after)]
    least = LEAST * max(side.step_ns for side in whole)
    nothing = Side(0.0, 0.0, 0.0)
    found = []
    for name, kind in sorted({*one, *other}):
        was, now = one.get((name, kind), nothing), other.get((name, kind), nothing)
        noise = max(was.spread_ns, now.spread_ns, least)
        found.append(Difference(name, kind, _change(was, now, noise), was, now))
    found.sort(key=lambda d: -abs(d.delta_ns))
    longer = whole[1].step_ns - whole[0].step_ns
    noise = max(*(side.spread_ns for side in whole), REGRESSION * whole[0].step_ns)
    return Diff(whole[0], whole[1], found, longer > noise)


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
    middle = median(times)
    # Two standard deviations, by the median of the distances: one odd step decides nothing.
    spread = 2 * 1.4826 * median(abs(time - middle) for time in times)
    return Side(median(calls), middle, spread)


def _by_name(rank: RankSummary) -> dict[tuple[str, str], Side]:
    timeline = rank.timeline
    assert timeline is not None  # summarise(..., timelines=True)
    windows = [(s, e) for s, e in rank.windows] or [timeline.window]
    names = {code: short_name(timeline.names[code]) for code in np.unique(timeline.name).tolist()}
    lasted = timeline.end_ns - timeline.start_ns
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, (begin, end) in enumerate(windows):
        inside = np.flatnonzero((timeline.start_ns >= begin) & (timeline.start_ns < end))
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for row in inside.tolist():
            key = (names[int(timeline.name[row])], str(KINDS[int(timeline.kind[row])]))
            calls, total = sums.get(key, (0, 0))
            sums[key] = (calls + 1, total + int(lasted[row]))
        for key, (calls, total) in sums.items():
            found.setdefault(key, [(0.0, 0.0)] * len(windows))[number] = (calls, total)
    return {key: _side(steps) for key, steps in found.items()}
