"""How far predicted tokens per second lie off the measured ones, by what is known of a run.

A factor, up or down, holds nine of ten runs. It is found by leaving out: of a stack that nobody has
measured, the stack's rows; of a generation of devices, all rows on it. Stacks weigh alike, however
many rows they have: a user's run is a new stack, not one more row of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import prices
from benchmarks.prices import LeftOut, stack_of
from benchmarks.validation import Row

Numbers = npt.NDArray[np.floating[Any]]

COVERED = 0.9
REGIMES = ("dense", "RL", "experts", "adapters", "low-bit")
# Up to so many nodes at least three stacks have runs; beyond, intervals widen.
NODES = 16
# What is assumed of the widening per doubling of nodes where rows show less.
LEAST_PER_DOUBLING = 0.1
# A stack with fewer runs says little of what nine of ten stay within.
LEAST_ROWS = 3
# Parts that the models of a stack with one source are divided into, each left out once.
FOLDS = 4


class Intervals(NamedTuple):
    """Factors by regime of stacks that were fitted and of others; of other devices; by nodes."""

    known: dict[str, float]
    new: dict[str, float]
    device: float
    per_doubling: float
    # Standard deviations of log errors by regime: of stacks, and of runs of one stack and device.
    between: dict[str, float]
    within: dict[str, float]

    def of(self, row: Row, *, known: bool) -> float:
        """The logarithm of a row's factor."""
        factors = self.known if known else self.new
        log = np.log(factors.get(row.regime, factors["experts"]))
        doublings = max(0.0, np.log2(row.nodes / NODES))
        return float(log * (1.0 + self.per_doubling * doublings))


def factor(by_stack: Sequence[Numbers]) -> float:
    """What 90 % of rows stay within; the level is slightly higher because a sample is finite."""
    sizes = np.concatenate([np.abs(off) for off in by_stack])
    shares = np.concatenate([np.full(len(off), 1 / len(off)) for off in by_stack])
    order = np.argsort(sizes)
    reached = np.cumsum(shares[order]) / shares.sum()
    level = min(1.0, COVERED * (1 + 1 / len(sizes)))
    last = min(int(np.searchsorted(reached, level)), len(sizes) - 1)
    return float(np.exp(sizes[order][last]))


def find(rows: Sequence[Row], alone: Sequence[LeftOut], fitted: Mapping[str, float]) -> Intervals:
    """From models, stacks and devices left out of the fit, each in turn."""
    off = _of_other_releases(rows, fitted)
    known: dict[str, float] = {}
    new: dict[str, float] = {}
    regimes = {row.regime for row in rows}
    for regime in (name for name in REGIMES if name in regimes):
        inside = [
            off[[row.regime == regime and stack_of(row) == one.stack for row in rows]]
            for one in alone
        ]
        several = [one for one in inside if len(one) >= LEAST_ROWS]
        outside = [one.off[[row.regime == regime for row in one.rows]] for one in alone]
        new[regime] = factor([one for one in outside if len(one)])
        # What is known of a stack cannot make it less certain.
        within = factor(several or [one for one in inside if len(one)])
        known[regime] = min(new[regime], within)
    # Whatever makes dense training uncertain is part of every other kind of run.
    new = {regime: max(one, new["dense"]) for regime, one in new.items()}
    known = {regime: max(one, known["dense"]) for regime, one in known.items()}
    spread = {regime: deviations(alone, regime) for regime in known}
    # A regime without two runs of one stack and device says nothing of how much these differ.
    widest = max(one.within for one in spread.values())
    within_runs = {
        regime: max(one.within or widest, spread["dense"].within) for regime, one in spread.items()
    }
    return Intervals(
        known,
        new,
        _of_devices(rows, fitted),
        _per_doubling(alone),
        between={regime: one.between for regime, one in spread.items()},
        within=within_runs,
    )


class Deviations(NamedTuple):
    """Standard deviations of log errors: of a stack on a device, and of its runs."""

    between: float
    within: float

    def weight(self, steps: int) -> float:
        """How much of a measured error is that of the stack, where as many steps show it."""
        whole = steps * self.between**2 + self.within**2
        return steps * self.between**2 / whole if whole else 0.0


def deviations(alone: Sequence[LeftOut], regime: str) -> Deviations:
    """From stacks left out, each device of a stack weighing alike."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one in alone:
        for row, off in zip(one.rows, one.off, strict=True):
            if row.regime == regime:
                groups.setdefault((one.stack, row.gpu), []).append(float(off))
    if not groups:
        return Deviations(0.0, 0.0)
    several = [np.asarray(off) for off in groups.values() if len(off) > 1]
    within = float(np.mean([off.var(ddof=1) for off in several])) if several else 0.0
    means = [np.mean(off) ** 2 - within / len(off) for off in groups.values()]
    between = max(0.0, float(np.mean(means)))
    return Deviations(between**0.5, within**0.5)


def _of_other_releases(rows: Sequence[Row], fitted: Mapping[str, float]) -> Numbers:
    """Log errors of rows whose stack was fitted on its other sources, or models, only.

    A user of a stack has a release and models of it that nobody has measured.
    """
    sources: dict[str, set[str]] = {}
    for row in rows:
        sources.setdefault(stack_of(row), set()).add(row.source)
    sizes = sorted({(stack_of(row), row.gpu, row.units.numel) for row in rows})

    def part(row: Row) -> object:
        if len(sources[stack_of(row)]) > 1:
            return row.source
        return sizes.index((stack_of(row), row.gpu, row.units.numel)) % FOLDS

    off = np.empty(len(rows))
    parts = [part(row) for row in rows]
    for one in dict.fromkeys(parts):
        inside = np.asarray([each == one for each in parts])
        others = [row for row, chosen in zip(rows, inside, strict=True) if not chosen]
        chosen = [row for row, chosen in zip(rows, inside, strict=True) if chosen]
        off[inside] = prices.log_errors(chosen, prices.fit(others, near=fitted).values)
    return off


def _of_devices(rows: Sequence[Row], fitted: Mapping[str, float]) -> float:
    """Of dense runs on a generation of devices that is left out whole, with kernels of its own."""
    dense = [row for row in rows if row.regime == "dense"]
    return factor([one.off for one in prices.left_out(dense, lambda row: row.kind, near=fitted)])


def _per_doubling(alone: Sequence[LeftOut]) -> float:
    """How much larger errors are on more nodes than most stacks have, on a logarithmic scale.

    Of stacks with runs on fewer nodes and on more: their level is in both.
    """
    near, far, doublings = [], [], []
    for one in alone:
        nodes = np.asarray([row.nodes for row in one.rows])
        beyond = nodes > NODES
        if beyond.any() and not beyond.all():
            near.append(one.off[~beyond])
            far.append(one.off[beyond])
            doublings += list(np.log2(nodes[beyond] / NODES))
    larger = np.log(factor(far)) / np.log(factor(near)) - 1.0
    return max(LEAST_PER_DOUBLING, float(larger / np.mean(doublings)))
