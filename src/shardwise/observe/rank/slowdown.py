"""How much slower compute runs while communication does: both want the same memory and units.

Kernels of one name are compared with themselves, beside a collective and alone. Names whose runs
differ among themselves, because one name serves several sizes, say nothing and are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.timeline.intervals import length_until
from shardwise.timeline.spans import Timeline

# Runs of a name may differ this much, as a share of their mean.
_ALIKE = 0.1
_LEAST_RUNS, _LEAST_KERNELS = 5, 30


class Slowdown(NamedTuple):
    """`ratio` is time beside communication over time alone, for the same kernels."""

    ratio: float
    # What it was measured on: kernels beside communication, and their time.
    kernels: int
    time_ns: int


def slowdown_of(timeline: Timeline) -> Slowdown | None:
    """None where no name ran often enough both ways."""
    computing = np.flatnonzero(timeline.of_kind("compute"))
    moving = timeline.covered("communication")
    start, end = timeline.start_ns[computing], timeline.end_ns[computing]
    lasted = end - start
    covered = length_until(moving, end) - length_until(moving, start)
    beside = (covered >= 0.9 * lasted) & (lasted > 0)
    alone = (covered == 0) & (lasted > 0)
    names = timeline.name[computing]
    beside_ns, alone_ns, count = 0, 0.0, 0
    for name in np.unique(names[beside]).tolist():
        mine = names == name
        lone = lasted[mine & alone]
        together = lasted[mine & beside]
        if min(len(lone), len(together)) < _LEAST_RUNS:
            continue
        if any(runs.std() > _ALIKE * runs.mean() for runs in (lone, together)):
            continue
        beside_ns += int(together.sum())
        alone_ns += len(together) * float(lone.mean())
        count += len(together)
    if count < _LEAST_KERNELS:
        return None
    return Slowdown(beside_ns / alone_ns, count, beside_ns)
