"""Equal units in a row as one: how many of them each configuration has.

A model's units repeat, and so do their events. What differs from unit to unit is the unit itself,
what its neighbours are (whose gather it issues, whose buffer it frees), and how many of its blocks
recompute: the first blocks of the model do, as many as the configuration says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from shardwise.predict.configurations import Ints
from shardwise.units.unit import ModelUnits, Unit


class Group(NamedTuple):
    """Consecutive units that do the same."""

    unit: Unit
    # Index of the first of them, in forward order.
    place: int
    # By row: so many of the unit's blocks, the first ones, recompute everything.
    recomputed: Ints
    # By row: so many units; None where it is one in all of them.
    times: Ints | None


def groups(
    units: ModelUnits,
    recomputed_blocks: Ints,
    neighbours: Callable[[int], Hashable],
    *,
    reverse: bool = False,
    apart: bool = False,
) -> Iterator[Group]:
    """The groups in forward order, or `reverse`; with `apart` each unit is one of its own."""
    sizes = [len(unit.blocks) for unit in units.blocks]
    starts = np.cumsum([0, *sizes])

    def key(index: int) -> Hashable:
        return (id(units.blocks[index]), neighbours(index), index if apart else 0)

    runs = [list(found) for _, found in groupby(range(len(units.blocks)), key)]
    for run in reversed(runs) if reverse else runs:
        made = _by_recomputation(
            units.blocks[run[0]], run[0], len(run), recomputed_blocks - int(starts[run[0]])
        )
        yield from reversed(made) if reverse else made


def _by_recomputation(unit: Unit, place: int, length: int, beyond: Ints) -> list[Group]:
    """A run of `length` units whose first `beyond` blocks recompute: whole units, one in part,
    and the rest.
    """
    size = len(unit.blocks)
    clipped = np.clip(beyond, 0, length * size)
    if length == 1:
        return [Group(unit, place, clipped, None)]
    whole, part = np.divmod(clipped, size)
    found = [(size, whole)]
    found += [(some, (part == some).astype(np.int64)) for some in range(size - 1, 0, -1)]
    found.append((0, length - whole - (part > 0)))
    return [
        Group(unit, place, np.full_like(clipped, some), times)
        for some, times in found
        if times.any()
    ]


def neighbour(units: ModelUnits, index: int) -> Unit | None:
    """The unit at `index`, or None beyond the first and the last."""
    return units.blocks[index] if 0 <= index < len(units.blocks) else None


def identity(*found: Any) -> tuple[int, ...]:
    """Units as a key: equal units are one object."""
    return tuple(id(one) for one in found)
