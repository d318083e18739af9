"""Where the steps of a recording begin: by what the program named, else by what recurs."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from shardwise.observe.memory.allocator import Device, Event
from shardwise.observe.memory.frames import Owner
from shardwise.observe.memory.timeline import Allocation

FEWEST = 4
# How far apart steps of one program may lie from even, and how much of a step it frees again.
UNEVEN, FREED = 0.1, 0.9


class Steps(NamedTuple):
    """Events at which steps begin, and by what that is known."""

    bounds: tuple[int, ...]
    by: str


def steps_of(
    device: Device, allocations: Sequence[Allocation], owners: Sequence[Owner]
) -> Steps | None:
    """The best evidence there is, or None."""
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
    """Annotations that count: `ProfilerStep#3`, or whatever else says step."""
    groups: dict[str, list[int]] = {}
    for mark in device.marks:
        groups.setdefault(re.sub(r"#?\d+", "", mark.name), []).append(mark.time_us)
    named = [name for name in groups if "step" in name.lower() and len(groups[name]) >= FEWEST]
    if not named:
        return None
    name = min(named, key=lambda name: (not name.startswith("ProfilerStep"), len(groups[name])))
    times, latest = [], 0
    for event in device.events:
        latest = max(latest, event.time_us or 0)
        times.append(latest)
    bounds = sorted({bisect_left(times, time) for time in groups[name]})
    return Steps(tuple(bounds), f"annotations '{name}'") if len(bounds) >= FEWEST else None


def _by_notes(events: Sequence[Event]) -> Steps | None:
    """Metadata that counts, set with `torch.cuda.memory._set_memory_metadata`."""
    bounds, last, seen = [], "", set()
    for number, event in enumerate(events):
        if event.action == "alloc" and event.note != last and re.search(r"\d", event.note):
            last = event.note
            seen.add(re.sub(r"\d+", "#", last))
            bounds.append(number)
    return Steps(tuple(bounds), "metadata") if len(bounds) >= FEWEST and len(seen) == 1 else None


def _by_optimizer(allocations: Sequence[Allocation], owners: Sequence[Owner]) -> Steps | None:
    """The optimizer's first allocation after others is the end of a step."""
    bounds, inside = [], False
    for one, owner in zip(allocations, owners, strict=True):
        if owner.category == "optimizer" and one.born:
            if not inside:
                bounds.append(one.born)
            inside = True
        elif owner.category in ("forward", "backward", "gradients"):
            inside = False
    return Steps(tuple(bounds), "optimizer steps") if len(bounds) >= FEWEST else None


def recurring(keys: Sequence[Hashable | None], change: Sequence[int]) -> Steps | None:
    """Where the same allocations come back evenly, and what is allocated between is freed again.

    Layers of one forward recur too, but keep what they made: those are no steps. The first step
    may be longer than the others, since it sets things up.
    """
    made = list(accumulate((max(0, size) for size in change), initial=0))
    freed = list(accumulate((max(0, -size) for size in change), initial=0))
    for length in (1, 3):
        # What comes only once in a step has the longest way to its next.
        for places in sorted(_places(keys, length), key=len):
            if _is_even(places[1:]) and places[-1] - places[1] >= len(keys) / 2:
                bounds = places if _is_even(places) else places[1:]
                if all(
                    freed[b] - freed[a] >= FREED * (made[b] - made[a]) for a, b in pairwise(bounds)
                ):
                    return Steps(tuple(bounds), "allocations that recur evenly")
    return None


def _places(keys: Sequence[Hashable | None], length: int) -> list[list[int]]:
    """Where each run of `length` allocations ends, for every one that is seen."""
    seen: dict[Hashable, list[int]] = {}
    last: tuple[Hashable, ...] = ()
    for number, key in enumerate(keys):
        if key is not None:
            last = (*last[1 - length :], key) if length > 1 else (key,)
            seen.setdefault(last, []).append(number)
    return list(seen.values())


def _is_even(places: Sequence[int]) -> bool:
    if len(places) < FEWEST:
        return False
    gaps = [after - before for before, after in pairwise(places)]
    usual = median(gaps)
    return usual >= 2 and max(abs(gap - usual) for gap in gaps) <= UNEVEN * usual
