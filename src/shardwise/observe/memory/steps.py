"""Find the steps of a recording: by annotations, metadata, the optimizer, or recurrence."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from shardwise.observe.memory.allocator import Device, Event
from shardwise.observe.memory.frames import Owner
from shardwise.observe.memory.record import StepSource
from shardwise.observe.memory.timeline import Allocation

MIN_BOUNDS = 4
# Largest deviation of a step from the median length; least share of bytes that a step frees.
MAX_DEVIATION, MIN_FREED = 0.1, 0.9


class Steps(NamedTuple):
    """Indices of the events at which steps start, and the evidence for them."""

    bounds: tuple[int, ...]
    by: StepSource


def steps_of(
    device: Device, allocations: Sequence[Allocation], owners: Sequence[Owner]
) -> Steps | None:
    """The steps of a recording, by the most certain evidence; None if there is none."""
    marked = _by_marks(device)
    if marked is None:
        marked = _by_notes(device.events)
    if marked is None:
        marked = _by_optimizer(allocations, owners)
    if marked is not None:
        return marked
    keys: list[Hashable | None] = [None] * (len(device.events) + 1)
    change = [0] * (len(device.events) + 1)
    for one in allocations:
        if one.born:
            keys[one.born] = (one.size, one.stack)
            change[one.born] += one.size
        if one.died is not None:
            change[one.died] -= one.size
    return recurring(keys, change)


def _by_marks(device: Device) -> Steps | None:
    """Steps by numbered annotations: `ProfilerStep#3`, or others with "step" in their name."""
    groups: dict[str, list[int]] = {}
    for mark in device.marks:
        groups.setdefault(re.sub(r"#?\d+", "", mark.name), []).append(mark.time_us)
    named = [name for name in groups if "step" in name.lower() and len(groups[name]) >= MIN_BOUNDS]
    if not named:
        return None
    name = min(named, key=lambda name: (not name.startswith("ProfilerStep"), len(groups[name])))
    times, latest = [], 0
    for event in device.events:
        latest = max(latest, event.time_us or 0)
        times.append(latest)
    bounds = sorted({bisect_left(times, time) for time in groups[name]})
    return Steps(tuple(bounds), "annotations") if len(bounds) >= MIN_BOUNDS else None


def _by_notes(events: Sequence[Event]) -> Steps | None:
    """Steps by numbered metadata, set with `torch.cuda.memory._set_memory_metadata`."""
    bounds, last, seen = [], "", set()
    for number, event in enumerate(events):
        if event.action == "alloc" and event.note != last and re.search(r"\d", event.note):
            last = event.note
            seen.add(re.sub(r"\d+", "#", last))
            bounds.append(number)
    return (
        Steps(tuple(bounds), "metadata") if len(bounds) >= MIN_BOUNDS and len(seen) == 1 else None
    )


def _by_optimizer(allocations: Sequence[Allocation], owners: Sequence[Owner]) -> Steps | None:
    """Steps by the optimizer: each starts with its first allocation after a forward or backward."""
    bounds, inside = [], False
    for one, owner in zip(allocations, owners, strict=True):
        if owner.category == "optimizer" and one.born:
            if not inside:
                bounds.append(one.born)
            inside = True
        elif owner.category in ("forward", "backward", "gradients"):
            inside = False
    return Steps(tuple(bounds), "optimizer") if len(bounds) >= MIN_BOUNDS else None


def recurring(keys: Sequence[Hashable | None], change: Sequence[int]) -> Steps | None:
    """Steps by allocations that recur evenly, if each step frees about as much as it allocates.

    `keys` identifies the allocation of each event (None: it has none), `change` is its change of
    allocated bytes. The layers of a forward recur too, but keep their allocations, so they are not
    steps. The first step may be longer, since it initialises.
    """
    made = list(accumulate((max(0, size) for size in change), initial=0))
    freed = list(accumulate((max(0, -size) for size in change), initial=0))
    for length in (1, 3):
        # Try the rarest first: they are most likely to occur once per step.
        for positions in sorted(_positions(keys, length), key=len):
            if _is_even(positions[1:]) and positions[-1] - positions[1] >= len(keys) / 2:
                bounds = positions if _is_even(positions) else positions[1:]
                if all(
                    freed[b] - freed[a] >= MIN_FREED * (made[b] - made[a])
                    for a, b in pairwise(bounds)
                ):
                    return Steps(tuple(bounds), "recurrence")
    return None


def _positions(keys: Sequence[Hashable | None], length: int) -> list[list[int]]:
    """For every distinct sequence of `length` allocations, the positions where it ends."""
    seen: dict[Hashable, list[int]] = {}
    last: tuple[Hashable, ...] = ()
    for number, key in enumerate(keys):
        if key is not None:
            last = (*last[1 - length :], key) if length > 1 else (key,)
            seen.setdefault(last, []).append(number)
    return list(seen.values())


def _is_even(positions: Sequence[int]) -> bool:
    """Whether there are at least MIN_BOUNDS positions, with about the same distance."""
    if len(positions) < MIN_BOUNDS:
        return False
    gaps = [after - before for before, after in pairwise(positions)]
    usual = median(gaps)
    return usual >= 2 and max(abs(gap - usual) for gap in gaps) <= MAX_DEVIATION * usual
