"""The search: price every configuration of the space, keep what fits, refine the fastest.

Two passes. The first prices every placement with every batch and every share of recomputation; it
settles what matters. The second varies what matters less (prefetch, blocks per unit, the dtype of
reductions) around the fastest of the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import numpy as np

from shardwise.planning.problem import Problem, Units, peaks, times
from shardwise.planning.rows import Candidate, Rows, Table
from shardwise.planning.space import Space, batches, placements
from shardwise.predict.configurations import Floats, Ints
from shardwise.predict.estimate import usable_bytes
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.strategy import Strategy

# Rows beyond the device that are priced all the same: they say what more memory would bring.
WITH_MORE_MEMORY = 1.25
# How many of the fastest the second pass starts from.
REFINED = 24
# Speeds closer than this are decided by simplicity.
TIE = 0.025
# Not sharding at all is so much simpler that it may be this much slower, well within the error of
# any prediction.
UNSHARDED_TIE = 0.1


class Nearest(NamedTuple):
    """The configuration of a layout that takes the least memory."""

    strategy: Strategy
    needed_bytes: float


class Found(NamedTuple):
    """The outcome of a search."""

    table: Table
    # By layout.
    nearest: dict[str, Nearest]
    considered: int
    fitting: int
    limit_bytes: int

    def best(self, layout: str | None = None, memory: float = 1.0) -> Candidate | None:
        """The simplest of the fastest, of one layout or of all.

        Where nothing needs to be sharded and little is lost, nothing is.

        `memory` is what it may take, as a multiple of what a device can safely give.
        """
        eligible = self._within(memory)
        if layout is not None:
            if layout not in self.table.layouts:
                return None
            eligible &= self.table.layout == self.table.layouts.index(layout)
        rows = np.flatnonzero(eligible)
        if not len(rows):
            return None
        speed = self.table.tokens_per_s[rows]
        simplest = self._simplest(rows[speed >= (1 - TIE) * speed.max()])
        if layout is None and simplest.strategy.sharded:
            unsharded = self.best("ddp", memory)
            if unsharded and unsharded.tokens_per_s >= (1 - UNSHARDED_TIE) * float(speed.max()):
                return unsharded
        return simplest

    def smallest(self, at_least: float) -> Candidate | None:
        """The one that takes the least memory of those with at least this many tokens/s."""
        rows = np.flatnonzero(self._within(1.0) & (self.table.tokens_per_s >= at_least))
        if not len(rows):
            return None
        needed = self.table.needed_bytes[rows]
        return self._simplest(rows[needed <= needed.min() * (1 + TIE)])

    def _simplest(self, rows: Ints) -> Candidate:
        """Of equally simple ones the fastest."""
        order = np.lexsort((-self.table.tokens_per_s[rows], self.table.complexity[rows]))
        return self.table.candidate(int(rows[order[0]]))

    def front(self, most: int = 5) -> list[Candidate]:
        """The fastest of all, then of those that take less memory, and so on down."""
        found: list[Candidate] = []
        memory = 1.0
        while len(found) < most:
            candidate = self.best(memory=memory)
            if candidate is None:
                break
            found.append(candidate)
            # Steps of a few percent of the device, so that neighbours differ in earnest.
            memory = min(candidate.needed_bytes / self.limit_bytes - 0.05, memory * 0.85)
        return found

    def layouts(self) -> list[Candidate]:
        """The best of every layout of which something fits, the fastest first."""
        each = (self.best(layout) for layout in self.table.layouts)
        return sorted((c for c in each if c), key=lambda c: -c.tokens_per_s)

    def rejected(self) -> list[Nearest]:
        """The layouts of which nothing fits, the nearest first."""
        misses = [n for n in self.nearest.values() if n.needed_bytes > self.limit_bytes]
        return sorted(misses, key=lambda n: n.needed_bytes)

    def _within(self, memory: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        eligible: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            self.table.needed_bytes <= self.limit_bytes * memory
        )
        return eligible


class Search:
    """One search; `run` gives its outcome."""

    def __init__(self, problem: Problem, space: Space | None = None) -> None:
        self.problem, self.space = problem, space or Space()
        self.units = Units(problem)
        self.limit = usable_bytes(problem.cluster.device)
        self.table = Table()
        # Rows that were timed, with their peaks.
        self._kept: list[tuple[Rows, Ints, Floats, Floats]] = []
        self.nearest: dict[str, Nearest] = {}
        self.considered = self.fitting = 0

    def run(self) -> Found:
        problem, space = self.problem, self.space
        sizes = batches(problem.job, problem.cluster, space)
        accumulates = any(count > 1 for _, count in sizes)
        chosen = placements(problem.cluster, problem.base, accumulates, space)
        if space.offload:
            chosen = [s.but(offload=True) for s in chosen if s.sharded]
        for autocast in (True, False):
            alike = [s for s in chosen if s.autocast == autocast]
            if alike:
                self._price(Rows.product(alike, sizes, space.recompute, space.allowed))
        by_units: dict[tuple[bool, int], list[Strategy]] = {}
        for strategy in self._variants(self._fastest()):
            key = (strategy.autocast, strategy.blocks_per_unit)
            by_units.setdefault(key, []).append(strategy)
        for strategies in by_units.values():
            self._price(Rows.each(strategies))
        return Found(self.table, self.nearest, self.considered, self.fitting, self.limit)

    def _price(self, rows: Rows) -> None:
        if not len(rows.which):
            return
        units = self.units.of(rows.strategies[0])
        peak, needed = peaks(units, rows.columns, self.problem)
        self.considered += len(needed)
        self.fitting += int((needed <= self.limit).sum())
        for index, one in enumerate(rows.strategies):
            mine = np.flatnonzero(rows.which == index)
            if not len(mine):
                continue
            row = int(mine[needed[mine].argmin()])
            known = self.nearest.get(str(one))
            if known is None or needed[row] < known.needed_bytes:
                self.nearest[str(one)] = Nearest(rows.strategy(row), float(needed[row]))
        kept: Ints = np.flatnonzero(needed <= self.limit * WITH_MORE_MEMORY)
        if len(kept):
            self._kept.append((rows, kept, peak[kept], needed[kept]))
            self._time(self.table, *self._kept[-1], self.problem.cluster)

    def _time(
        self,
        table: Table,
        rows: Rows,
        kept: Ints,
        peak: Floats,
        needed: Floats,
        cluster: ClusterSpec,
    ) -> None:
        strategy, states = rows.strategies[0], self.problem.states
        units, columns = self.units.of(strategy), rows.columns.take(kept)
        found = times(units, columns, cluster, strategy.param_dtype, states)
        table.add(rows, kept, peak, needed, found, self.problem.job.seq_len)

    def retimed(self, cluster: ClusterSpec) -> Found:
        """What the search found, with the times of another network: memory stays as it is."""
        table = Table()
        for rows, kept, peak, needed in self._kept:
            self._time(table, rows, kept, peak, needed, cluster)
        return Found(table, self.nearest, self.considered, self.fitting, self.limit)

    def _fastest(self) -> list[Candidate]:
        """Of what fits, and of what nearly does: less prefetch may let it."""
        found: list[Candidate] = []
        needed, speed = self.table.needed_bytes, self.table.tokens_per_s
        nearly = (needed > self.limit) & (needed <= self.limit * 1.1)
        for eligible in (needed <= self.limit, nearly):
            rows = np.flatnonzero(eligible)
            order = np.argsort(-speed[rows], kind="stable")[:REFINED]
            found += [self.table.candidate(int(row)) for row in rows[order]]
        return found

    def _variants(self, candidates: Iterable[Candidate]) -> Iterable[Strategy]:
        space = self.space
        tried = set()
        for candidate in candidates:
            strategy = candidate.strategy
            if not strategy.sharded or strategy.shard == 1:
                continue
            dtypes = space.reduce_dtypes or (strategy.reduce_dtype,)
            for prefetch, forward, blocks, dtype in product(
                space.prefetch, space.forward_prefetch, space.blocks_per_unit, dtypes
            ):
                changed = strategy.but(
                    prefetch=prefetch,
                    forward_prefetch=forward,
                    blocks_per_unit=blocks,
                    reduce_dtype=dtype,
                )
                text = repr(changed)
                if text not in tried and changed != strategy and space.allowed(changed):
                    tried.add(text)
                    yield changed
