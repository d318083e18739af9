"""Group consecutive equal units, so that their events are emitted once and repeated.

Units are equal if they have the same content, the same neighbours (whose gather they issue, whose
buffer they free), and the same number of blocks that recompute. The first blocks of the model
recompute, as many as each configuration says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from shardwise.predict.configurations import Ints
from shardwise.units.unit import ModelUnits, Unit


class UnitGroup(NamedTuple):
    """Consecutive equal units, with the same events."""

    unit: Unit
    # Index of the group's first unit, in forward order.
    place: int
    # By row: how many of each unit's blocks, from its first, recompute everything.
    recomputed: Ints
    # By row: the number of units; None for exactly one in every row.
    times: Ints | None
    # Groups with the same key have the same events: units with the same content, neighbours and
    # recomputation need not be next to each other.
    key: Hashable = None


def groups(
    units: ModelUnits,
    recomputed_blocks: Ints,
    neighbours: Callable[[int], Hashable],
    *,
    reverse: bool = False,
    apart: bool = False,
) -> Iterator[UnitGroup]:
    """The groups of a model's units, in forward order or in `reverse`.

    `recomputed_blocks` is, by row, how many of the model's first blocks recompute. `neighbours`
    gives a key of what else decides a unit's events. With `apart` each unit is its own group.
    """
    sizes = [len(unit.blocks) for unit in units.blocks]
    # One object for all columns of the same values, so that a key can name it by its identity.
    columns: dict[bytes, Ints] = {}
    starts = np.cumsum([0, *sizes])

    def key(index: int) -> tuple[Hashable, ...]:
        return (id(units.blocks[index]), neighbours(index), index if apart else 0)

    runs = [list(found) for _, found in groupby(range(len(units.blocks)), key)]
    for run in reversed(runs) if reverse else runs:
        made = _by_recomputation(
            units.blocks[run[0]], run[0], len(run), recomputed_blocks - int(starts[run[0]])
        )
        for one in reversed(made) if reverse else made:
            column = columns.setdefault(one.recomputed.tobytes(), one.recomputed)
            yield one._replace(recomputed=column, key=(*key(run[0]), id(column)))


def _by_recomputation(unit: Unit, place: int, length: int, beyond: Ints) -> list[UnitGroup]:
    """Groups of `length` equal units whose first `beyond` blocks recompute (by row).

    First the units that recompute fully, then the one that does in part, then the others.
    """
    size = len(unit.blocks)
    clipped = np.clip(beyond, 0, length * size)
    if length == 1:
        return [UnitGroup(unit, place, clipped, None)]
    whole, part = np.divmod(clipped, size)
    found = [(size, whole)]
    found += [(some, (part == some).astype(np.int64)) for some in range(size - 1, 0, -1)]
    found.append((0, length - whole - (part > 0)))
    return [
        UnitGroup(unit, place, np.full_like(clipped, some), times)
        for some, times in found
        if times.any()
    ]


def neighbour(units: ModelUnits, index: int) -> Unit | None:
    """The block unit at `index`; None if there is none."""
    return units.blocks[index] if 0 <= index < len(units.blocks) else None


def identity(*found: Any) -> tuple[int, ...]:
    """A hashable key of units or None: their object ids, since equal units share one object."""
    return tuple(id(one) for one in found)
