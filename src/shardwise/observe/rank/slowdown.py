"""Slowdown of compute while communication runs: both share memory bandwidth and SMs.

Kernels are compared by name, with and without a collective at the same time. Names whose durations
vary, because one name serves several sizes, are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.step.intervals import length_before
from shardwise.step.spans import Timeline

# Largest standard deviation of the durations of one name, as a share of their mean.
_MAX_SPREAD = 0.1
_MIN_RUNS, _MIN_KERNELS = 5, 30


class Slowdown(NamedTuple):
    """`ratio` is the time of kernels during communication over their time without it."""

    ratio: float
    # Sample: kernels that ran during communication, and their time.
    kernels: int
    time_ns: int


def slowdown_of(timeline: Timeline) -> Slowdown | None:
    """Measure how much communication slows down kernels that run at the same time.

    None where no kernel ran often enough both with and without communication.
    """
    computing = np.flatnonzero(timeline.of_kind("compute"))
    moving = timeline.covered("communication")
    start, end = timeline.start_ns[computing], timeline.end_ns[computing]
    durations = end - start
    covered = length_before(moving, end) - length_before(moving, start)
    during = (covered >= 0.9 * durations) & (durations > 0)
    alone = (covered == 0) & (durations > 0)
    names = timeline.name[computing]
    during_ns, alone_ns, count = 0, 0.0, 0
    for name in np.unique(names[during]).tolist():
        mine = names == name
        runs_alone = durations[mine & alone]
        runs_during = durations[mine & during]
        if min(len(runs_alone), len(runs_during)) < _MIN_RUNS:
            continue
        if any(runs.std() > _MAX_SPREAD * runs.mean() for runs in (runs_alone, runs_during)):
            continue
        during_ns += int(runs_during.sum())
        alone_ns += len(runs_during) * float(runs_alone.mean())
        count += len(runs_during)
    if count < _MIN_KERNELS:
        return None
    return Slowdown(during_ns / alone_ns, count, during_ns)
