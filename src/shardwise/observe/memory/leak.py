"""Leaks: memory that grows from step to step, and the line that allocates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from shardwise.observe.memory.frames import Owner
from shardwise.observe.memory.record import Leak, StepSource, place_of
from shardwise.observe.memory.steps import Steps
from shardwise.observe.memory.timeline import Allocation

# Complete steps needed, and the largest ratio of growth between two steps of a steady leak.
MIN_STEPS, STEADY = 3, 1.5


def leak_of(
    allocations: Sequence[Allocation],
    owners: Sequence[Owner],
    allocated: Sequence[int],
    steps: Steps | None,
) -> Leak:
    """Find the line of code that leaves about the same number of bytes behind in every step.

    `allocated` has the allocated bytes after each event. Only complete steps are compared.
    """
    if steps is None:
        return Leak(None, "steps_unknown")
    spans = _complete_steps(steps, len(allocated) - 1)
    if len(spans) < MIN_STEPS:
        return Leak(None, "too_few_steps", len(spans), steps.by)
    left: dict[tuple[str | None, int | None, str], list[int]] = {}
    at = 0
    for one, owner in zip(allocations, owners, strict=True):
        # Allocations are ordered by birth.
        while at < len(spans) and one.born >= spans[at][1]:
            at += 1
        if at == len(spans):
            break
        if one.died is None and one.born >= spans[at][0]:
            place = (owner.file, owner.line, owner.function)
            left.setdefault(place, [0] * len(spans))[at] += one.size
    steady = {place: sizes for place, sizes in left.items() if _is_steady(sizes)}
    growth = allocated[spans[-1][1]] - allocated[spans[0][0]]
    kept = sum(sum(sizes) for sizes in steady.values())
    if not steady or growth < kept / 2:
        return Leak(False, "no_growth", len(spans), steps.by)
    (file, line, function), sizes = max(steady.items(), key=lambda item: sum(item[1]))
    per_step = int(median(sizes))
    owner_place = place_of(file, line, function)
    return Leak(True, "grows", len(spans), steps.by, per_step, owner_place, file)


def growth_of(bounds: Sequence[int], levels: Mapping[str, Sequence[int]], by: StepSource) -> Leak:
    """Find a leak from levels of memory alone: whether their sum grows steadily from step to step.

    `bounds` are the events at which steps start, `levels` the bytes after each event by kind. The
    leak is attributed to the kind that grows most.
    """
    inner = bounds[1:]
    if len(inner) <= MIN_STEPS:
        return Leak(None, "too_few_steps", max(0, len(inner) - 1), by)
    total = [sum(level[bound] for level in levels.values()) for bound in inner]
    rises = [after - before for before, after in pairwise(total)]
    if not _is_steady(rises):
        return Leak(False, "no_growth", len(rises), by)
    most = max(levels, key=lambda name: levels[name][inner[-1]] - levels[name][inner[0]])
    return Leak(True, "grows", len(rises), by, int(median(rises)), most)


def _complete_steps(steps: Steps, end: int) -> list[tuple[int, int]]:
    """The events at which each complete step starts and ends; `end` is the last event.

    The first step, which initialises, is left out if there are more than MIN_STEPS.
    """
    bounds = steps.bounds
    spans = list(pairwise(bounds))
    if spans and end - bounds[-1] < (spans[-1][1] - spans[-1][0]) / 2:
        spans.pop()
    return spans[1:] if len(spans) > MIN_STEPS else spans


def _is_steady(sizes: Sequence[int]) -> bool:
    """Whether all sizes are positive and within a factor of STEADY."""
    return min(sizes) > 0 and max(sizes) <= STEADY * min(sizes)
