"""Judge whether a measurement is good enough for predictions, and what is wrong if not."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shardwise.trials.calibrate.machine.measure import Machine

# Seconds in which the load of a machine is sampled.
_SAMPLE_S = 2.0
# Smallest acceptable R² of a line through message sizes.
MIN_R_SQUARED = 0.8
# Largest acceptable spread of repetitions (90th over 10th percentile), in the median over all work.
MAX_SPREAD = 2.0
# Share of the cores that other processes use before anything is measured.
MAX_LOAD = 0.25


class Doubt(NamedTuple):
    """A figure of a measurement beyond its limit; `where` names the collective of a fit."""

    kind: Literal["fit", "spread", "load"]
    value: float
    limit: float
    where: str = ""


def busy_share() -> float:
    """Share (0 to 1) of all cores in use now, sampled while this process waits."""
    import psutil

    return float(psutil.cpu_percent(_SAMPLE_S)) / 100


def find_doubts(machine: Machine) -> Iterator[Doubt]:
    """Yield each figure for which predictions from this measurement may be wrong."""
    if machine.load > MAX_LOAD:
        yield Doubt("load", machine.load, MAX_LOAD)
    timings = [one.timing for one in machine.compute.products]
    timings += [message.timing for one in machine.collectives for message in one.messages]
    spread = median(timing.spread for timing in timings)
    if spread > MAX_SPREAD:
        yield Doubt("spread", spread, MAX_SPREAD)
    if machine.collectives:
        worst = min(machine.collectives, key=lambda one: one.line.r_squared)
        if worst.line.r_squared < MIN_R_SQUARED:
            where = f"{worst.operation.replace('_', '-')} {worst.place}"
            yield Doubt("fit", worst.line.r_squared, MIN_R_SQUARED, where)
