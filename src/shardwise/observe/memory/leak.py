"""Whether memory grows from step to step, and where what stays was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from shardwise.observe.memory.frames import Owner
from shardwise.observe.memory.record import Leak, place_of
from shardwise.observe.memory.steps import Steps
from shardwise.observe.memory.timeline import Allocation

# Whole steps to compare, and how far growth may differ from one to the next and still be steady.
FEWEST, STEADY = 3, 1.5
UNKNOWN_STEPS = (
    "cannot be told: no annotation, no optimizer and no evenly recurring allocation marks steps"
)


def leak_of(
    allocations: Sequence[Allocation],
    owners: Sequence[Owner],
    allocated: Sequence[int],
    steps: Steps | None,
) -> Leak:
    """Places that leave about as many bytes behind in every step but the first and the last."""
    if steps is None:
        return Leak(None, UNKNOWN_STEPS)
    spans = _whole_steps(steps, len(allocated) - 1)
    if len(spans) < FEWEST:
        return Leak(None, f"cannot be told: fewer than {FEWEST} whole steps by {steps.by}")
    left: dict[tuple[str | None, int | None, str], list[int]] = {}
    at = 0
    for one, owner in zip(allocations, owners, strict=True):
        # Allocations come in the order of their birth.
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
        return Leak(
            False,
            f"none: over {len(spans)} steps by {steps.by} no place keeps more each step",
            len(spans),
        )
    (file, line, function), sizes = max(steady.items(), key=lambda item: sum(item[1]))
    per_step = int(median(sizes))
    return Leak(
        True,
        f"every one of {len(spans)} steps by {steps.by} leaves as much behind",
        len(spans),
        per_step,
        place_of(file, line, function),
        file,
    )


def growth_of(bounds: Sequence[int], levels: Mapping[str, Sequence[int]], by: str) -> Leak:
    """The same from levels alone: does the sum rise from one bound to the next, and which most."""
    inner = bounds[1:]
    if len(inner) <= FEWEST:
        return Leak(None, f"cannot be told: fewer than {FEWEST} whole steps by {by}")
    total = [sum(level[bound] for level in levels.values()) for bound in inner]
    rises = [after - before for before, after in pairwise(total)]
    if not _is_steady(rises):
        why = f"none: over {len(rises)} steps by {by} the level does not rise steadily"
        return Leak(False, why, len(rises))
    most = max(levels, key=lambda name: levels[name][inner[-1]] - levels[name][inner[0]])
    why = f"it rises in every one of {len(rises)} steps by {by}"
    return Leak(True, why, len(rises), int(median(rises)), most)


def _whole_steps(steps: Steps, end: int) -> list[tuple[int, int]]:
    """Without the first, which sets things up, and without what its successor may still free."""
    bounds = steps.bounds
    spans = list(pairwise(bounds))
    if spans and end - bounds[-1] < (spans[-1][1] - spans[-1][0]) / 2:
        spans.pop()
    return spans[1:] if len(spans) > FEWEST else spans


def _is_steady(sizes: Sequence[int]) -> bool:
    return min(sizes) > 0 and max(sizes) <= STEADY * min(sizes)
