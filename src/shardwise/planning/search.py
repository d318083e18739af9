"""The search: predict configurations in passes, keep those that fit, refine the fastest.

1. Every placement with a few micro-batches and every share of recomputation. Full recomputation
   comes first: micro-batches that do not fit with it are not tried with less.
2. The micro-batches between those, for the fastest placements.
3. Settings with a smaller effect (prefetch, blocks per unit, the dtype of reductions) for the
   fastest, and forward prefetch for the fastest of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import numpy as np

from shardwise.planning.batches import Batch, batches, batches_between, coarse_batches
from shardwise.planning.choice import ClosestToFitting, SearchResult
from shardwise.planning.degrees import degrees, is_last_resort, least_seconds, of_groups
from shardwise.planning.layout import UNDIVIDED, Degrees, Layout
from shardwise.planning.placed import Forms, Placed
from shardwise.planning.problem import BandwidthField, Problem, Units, peaks, steps, times
from shardwise.planning.rows import Candidate, Rows, Table
from shardwise.planning.space import Recompute, Space, offloaded, placements
from shardwise.predict.configurations import Bools, Floats, Ints
from shardwise.predict.estimate import usable_bytes
from shardwise.predict.program.step import Steps
from shardwise.predict.rates import comparison_error
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Loss, Strategy

# Rows are timed up to this multiple of the usable memory, to show what more memory would gain.
WITH_MORE_MEMORY = 1.25
# How many of the fastest configurations the last pass starts from.
REFINED = 24
# How many of the fastest after that are tried with forward prefetch.
PREFETCHED = 8
# How many placements the second pass refines at most, all within the comparison error.
REFINED_PLACEMENTS = 32
MICRO_BATCHES_BETWEEN = 6
# Recompute policies, and the number of batches, with which degrees of tensor and context
# parallelism are probed. Only the best degrees are searched in full.
PROBED = ("none", "selective", 0.5, "full")
PROBED_BATCHES = 4
# A chunked loss is tried only if logits take at least this share of the usable memory.
MIN_LOGITS = 0.02


class _TimedRows(NamedTuple):
    """Timed rows with their memory (bytes per device); `which` are their indices in `steps`."""

    rows: Rows
    peak_bytes: Floats
    needed_bytes: Floats
    steps: Steps
    which: Ints


@dataclass(frozen=True, eq=False)
class _DegreeSpace:
    """The placements and batches to try with one pair of tensor and context degrees."""

    degrees: Degrees
    placements: Placed
    # All batches, and those of the first pass.
    sizes: Sequence[Batch]
    first: Sequence[Batch]


class Search:
    """One search for the best configuration of a problem; `run` performs it."""

    def __init__(self, problem: Problem, space: Space | None = None) -> None:
        self.problem, self.space = problem, space or Space()
        self.units, self._forms = Units(problem), Forms()
        self.limit = usable_bytes(problem.cluster.device)
        self.table = self._empty_table()
        self._kept: list[_TimedRows] = []
        self.nearest: dict[Layout, ClosestToFitting] = {}
        self.considered = self.fitting = 0
        # Upper bounds of tokens/s by the degrees that were considered.
        self.bounds: dict[Degrees, float] = {}
        # The degrees that were searched in full.
        self.degrees: dict[Degrees, _DegreeSpace] = {}

    def run(self) -> SearchResult:
        """Run all passes and return everything that was predicted."""
        for divided in self._degrees_to_search():
            self.degrees[divided.degrees] = divided
            autocast = divided.placements.by_form(lambda s: s.autocast)
            for alike in filter(len, map(np.flatnonzero, (autocast, ~autocast))):
                self._price_placements(divided.placements.take(alike), divided.first)
        self._price_each(self._more_batches())
        self._price_each(self._variants())
        self._price_each(self._with_forward_prefetch())
        return self._result(self.table)

    def _degrees_to_search(self) -> Iterator[_DegreeSpace]:
        """The tensor and context degrees to search in full; no such parallelism comes first."""
        possible: list[_DegreeSpace] = []
        refused: SpecError | None = None
        for pair in degrees(self.problem, self.space, self.units.experts):
            try:
                placed = self._space_of_degrees(pair)
                if len(placed.placements) or pair == UNDIVIDED:
                    possible.append(placed)
            except SpecError as error:
                refused = refused or error
        if not possible:
            assert refused is not None, "no parallelism but that of data is always a possibility"
            raise refused
        if self.space.most_divided:
            most = max(one.degrees.inner for one in possible)
            possible = [one for one in possible if one.degrees.inner == most]
        if possible[0].degrees == UNDIVIDED:
            yield possible.pop(0)
        # Context parallelism on short sequences is tried only if nothing else fits.
        last = [one for one in possible if is_last_resort(one.degrees, self.problem)]
        yield from self._promising([one for one in possible if one not in last])
        if self._fastest_tokens_per_s() is None:
            yield from self._promising(last)

    def _promising(self, possible: Sequence[_DegreeSpace]) -> Iterator[_DegreeSpace]:
        """The fastest of the `possible` degrees, by trying a few placements of each; at most one.

        If no configuration fits at all, the degrees that need the least memory.
        """
        fastest = self._fastest_tokens_per_s() or 0.0
        tried: dict[_DegreeSpace, float] = {}
        bounds = {one.degrees: self._most_tokens_per_s(one) for one in possible}
        self.bounds |= bounds
        for divided in sorted(possible, key=lambda one: -bounds[one.degrees]):
            reached = max(tried.values(), default=0.0)
            if bounds[divided.degrees] <= max(reached, fastest * (1 + comparison_error())):
                break
            self._probe(divided)
            tried[divided] = self._fastest_tokens_per_s(divided.degrees) or 0.0
        best = sorted(tried, key=lambda one: -tried[one])
        found = [one for one in best if tried[one] > fastest]
        if not found and not fastest:
            # No configuration fits: take the one that needs the least memory.
            found = sorted(best, key=lambda one: self._least_bytes(one.degrees))[:1]
        yield from found[:1]

    def _probe(self, divided: _DegreeSpace) -> None:
        """Predict the simplest placements of some degrees, with a few batches and policies."""
        loss = divided.placements[-1].loss
        simple = divided.placements.where(
            lambda s: s.loss == loss and s.reshard_after_forward is True
        )
        usual = simple.where(lambda s: s.grad_sync in ("every", "local"))
        tried = next(one for one in (usual, simple, divided.placements) if len(one))
        shared = tried.take(np.flatnonzero(tried.shares_states))
        tried = shared if len(shared) else tried
        policies = tuple(p for p in self.space.recompute if p in PROBED) or self.space.recompute
        sizes = divided.first[:: -(-len(divided.first) // PROBED_BATCHES)]
        self._price(Rows.product(tried, sizes, policies, self.space.allowed))

    def _space_of_degrees(self, pair: Degrees) -> _DegreeSpace:
        """The placements and batches to try with these tensor and context degrees."""
        problem, space = self.problem, self.space
        groups = of_groups(problem.cluster, pair.inner)
        sizes = batches(problem.job, groups, space.micro_batches, space.batch_tolerance)
        accumulates = any(size.accumulate > 1 for size in sizes)
        split, forms = self.units.can_split, self._forms
        chosen = placements(
            groups, problem.base, accumulates, space, split_root=split, degrees=pair, forms=forms
        )
        chosen = chosen.where(partial(space.trains, problem.job.optimizer))
        if space.offload:
            chosen = Placed.of(offloaded(chosen, space.offload))
            chosen = chosen.where(partial(space.trains, problem.job.optimizer))
        if not len(chosen):
            return _DegreeSpace(pair, chosen, sizes, sizes)
        most = self._most_sequences(chosen[-1])
        sizes = [size for size in sizes if size.micro_batch <= most] or sizes[:1]
        by_loss = [chosen.but(loss=loss) for loss in self._losses(chosen[-1])]
        chosen = sum(by_loss[1:], by_loss[0])
        first = coarse_batches(sizes, asked=problem.job.global_batch is not None)
        return _DegreeSpace(pair, chosen, sizes, first)

    def _most_tokens_per_s(self, divided: _DegreeSpace) -> float:
        """Upper bound of tokens/s of any placement: only compute and collectives inside blocks."""
        batch, groups = divided.sizes[-1], self.problem.cluster.devices // divided.degrees.inner
        strategy = divided.placements[-1].but(micro_batch=batch.micro_batch, accumulate=1)
        seconds = least_seconds(self.problem, self.units.of(strategy), strategy)
        return groups * strategy.micro_batch * self.problem.job.seq_len / seconds

    def _fastest_tokens_per_s(self, pair: Degrees | None = None) -> float | None:
        """Most tokens/s of the configurations that fit so far, of all degrees or of `pair`.

        None if none fits.
        """
        columns = self.table.columns
        fits = columns.needed_bytes <= self.limit
        if pair is not None:
            wanted = [n for n, one in enumerate(self.table.layouts) if pair.divides(one)]
            fits &= np.isin(columns.layout, wanted)
        return float(columns.tokens_per_s[fits].max()) if fits.any() else None

    def _least_bytes(self, pair: Degrees) -> float:
        """Least bytes needed by any configuration of these degrees; infinite if none was tried."""
        needed = (n.needed_bytes for one, n in self.nearest.items() if pair.divides(one))
        return min(needed, default=math.inf)

    def _result(self, table: Table) -> SearchResult:
        node = self.problem.cluster.devices_per_node
        return SearchResult(table, self.nearest, self.considered, self.fitting, self.limit, node)

    def _empty_table(self) -> Table:
        return Table(self.problem.job)

    def _most_sequences(self, strategy: Strategy) -> int:
        """Upper bound of the micro-batch that fits: every block keeps at least its input.

        Only half of the inputs is counted, so that nothing that could fit is missed.
        """
        units = self.units.of(strategy.but(blocks_per_unit=1))
        tokens = self.problem.job.seq_len / strategy.context
        each = units.boundary_bytes * tokens * len(units.blocks) / 2
        return max(1, int(self.limit * WITH_MORE_MEMORY / each)) if each else 2**62

    def _losses(self, strategy: Strategy) -> tuple[Loss, ...]:
        """The losses to try: only the first of the space if logits take little memory.

        With tensor parallelism only the plain loss, which is divided along the vocabulary.
        """
        if strategy.tensor > 1:
            return ("plain",)
        units, job = self.units.of(strategy.but(blocks_per_unit=1)), self.problem.job
        stage = units.root.stage
        logits = max(moment.logit_bytes for moment in (stage.forward_peak, *stage.backward))
        worth = logits * job.seq_len / strategy.context >= MIN_LOGITS * self.limit
        return self.space.losses if worth and self.units.can_chunk else self.space.losses[:1]

    def _price_placements(self, strategies: Placed, sizes: Sequence[Batch]) -> None:
        """Predict every strategy, batch and policy.

        Only micro-batches that fit with the most recomputation are tried with less.
        """
        policies, allowed = self.space.recompute, self.space.allowed
        least = max(policies, key=_recompute_order)
        rows = Rows.product(strategies, sizes, (least,), allowed)
        needed = self._price(rows)
        reach = np.zeros(len(strategies), dtype=np.int64)
        fits = needed <= self.limit * WITH_MORE_MEMORY
        np.maximum.at(reach, rows.which[fits], rows.columns.micro_batch[fits])
        # If a strategy may not use the most recomputation, none of its micro-batches is excluded.
        refused = np.bincount(rows.which, minlength=len(strategies)) == 0
        reach[refused] = max(size.micro_batch for size in sizes)
        others = [policy for policy in policies if policy != least]
        if not others:
            return
        rest = Rows.product(strategies, sizes, others, allowed)
        self._price(rest.take(np.flatnonzero(rest.columns.micro_batch <= reach[rest.which])))

    def _price_each(self, strategies: Iterable[Strategy]) -> None:
        """Predict these strategies with their own batch and policy, together where units agree."""
        by_units: dict[tuple[object, ...], list[Strategy]] = {}
        for strategy in strategies:
            by_units.setdefault(_units_key(strategy), []).append(strategy)
        for alike in by_units.values():
            self._price(Rows.one_per_strategy(alike))

    def _price(self, rows: Rows) -> Floats:
        """Predict the memory of every row, and the time of those that fit or nearly fit.

        Returns the needed bytes per device of every row, and records everything.
        """
        if not len(rows.which):
            return np.empty(0)
        priced = steps(self.units.of(rows.strategies[0]), rows.columns, self.problem)
        peak, needed = peaks(priced, self.problem)
        self.considered += len(needed)
        self.fitting += int((needed <= self.limit).sum())
        for index in sorted(set(rows.which.tolist())):
            mine = np.flatnonzero(rows.which == index)
            row = int(mine[needed[mine].argmin()])
            layout = rows.strategies.layout(index)
            known = self.nearest.get(layout)
            if known is None or needed[row] < known.needed_bytes:
                self.nearest[layout] = ClosestToFitting(
                    rows.strategy(row), float(peak[row]), float(needed[row])
                )
        which: Ints = np.flatnonzero(needed <= self.limit * WITH_MORE_MEMORY)
        if len(which):
            kept = _TimedRows(rows.take(which), peak[which], needed[which], priced, which)
            self._kept.append(kept)
            self._time(self.table, kept, self.problem.cluster)
        return needed

    def _time(self, table: Table, kept: _TimedRows, cluster: ClusterSpec) -> None:
        """Add rows to a table, with their times on a cluster."""
        dtype = kept.rows.strategies[0].param_dtype
        found = times(kept.steps, cluster, dtype).take(kept.which)
        table.add(kept.rows, kept.peak_bytes, kept.needed_bytes, found)

    def retimed(self, cluster: ClusterSpec) -> SearchResult:
        """The outcome with all times predicted again for `cluster`; memory does not change.

        `cluster` may differ from the searched one only in its network or link.
        """
        table = self._empty_table()
        for kept in self._kept:
            self._time(table, kept, cluster)
        return self._result(table)

    def on_networks(self, factors: Floats, way: BandwidthField | None = None) -> list[SearchResult]:
        """For each factor, the outcome of the contenders with that multiple of a bandwidth.

        `way` names the bandwidth; without it the network's, or on a single node the link's.
        """
        tables = [self._empty_table() for _ in factors]
        for kept in self._contenders:
            dtype = kept.rows.strategies[0].param_dtype
            found = times(kept.steps, self.problem.cluster, dtype, factors, way)
            for index, table in enumerate(tables):
                table.add(kept.rows, kept.peak_bytes, kept.needed_bytes, found.take(index))
        return [self._result(table) for table in tables]

    @cached_property
    def _contenders(self) -> list[_TimedRows]:
        """The fastest row that fits of each layout and policy, grouped by equal units."""
        columns = self.table.columns
        best: dict[tuple[int, Recompute], int] = {}
        for index in np.flatnonzero(columns.needed_bytes <= self.limit).tolist():
            key = int(columns.layout[index]), self.table.policy(index)
            if key not in best or columns.tokens_per_s[index] > columns.tokens_per_s[best[key]]:
                best[key] = index
        alike: dict[tuple[object, ...], list[Candidate]] = {}
        for index in best.values():
            candidate = self.table.candidate(index)
            alike.setdefault(_units_key(candidate.strategy), []).append(candidate)
        return [self._timed_rows(group) for group in alike.values()]

    def _timed_rows(self, alike: Sequence[Candidate]) -> _TimedRows:
        """Candidates that share units, with the programs to time them."""
        rows = Rows.one_per_strategy([c.strategy for c in alike])
        return _TimedRows(
            rows,
            np.asarray([c.peak_bytes for c in alike]),
            np.asarray([c.needed_bytes for c in alike]),
            steps(self.units.of(rows.strategies[0]), rows.columns, self.problem),
            np.arange(len(alike)),
        )

    def _more_batches(self) -> Iterable[Strategy]:
        """The fastest placements, with micro-batches up to the next one the first pass tried."""
        columns = self.table.columns
        fits = np.flatnonzero((columns.needed_bytes <= self.limit) & self._fully_searched_rows)
        if not len(fits):
            return
        order = fits[np.argsort(-columns.tokens_per_s[fits], kind="stable")]
        least = (1 - comparison_error()) * columns.tokens_per_s[order[0]]
        seen: set[tuple[int, int, int]] = set()
        for index in order.tolist():
            key = self.table.placement(index)
            if columns.tokens_per_s[index] < least or len(seen) == REFINED_PLACEMENTS:
                return
            if key in seen:
                continue
            seen.add(key)
            strategy = self.table.candidate(index).strategy
            divided, low = self.degrees[Degrees.of(strategy)], strategy.micro_batch
            sizes, tried = divided.sizes, [size.micro_batch for size in divided.first]
            high = min((size for size in tried if size > low), default=sizes[-1].micro_batch + 1)
            for size in batches_between(sizes, low, high, MICRO_BATCHES_BETWEEN):
                yield strategy.but(micro_batch=size.micro_batch, accumulate=size.accumulate)

    def _fastest(self, low: float, high: float, most: int) -> list[Strategy]:
        """The `most` fastest strategies that need between `low` and `high` times usable memory."""
        needed, speed = self.table.columns.needed_bytes, self.table.columns.tokens_per_s
        rows = np.flatnonzero(
            (needed > self.limit * low) & (needed <= self.limit * high) & self._fully_searched_rows
        )
        order = np.argsort(-speed[rows], kind="stable")[:most]
        return [self.table.candidate(int(row)).strategy for row in rows[order]]

    def _smallest(self) -> list[Strategy]:
        """The strategies that need the least memory."""
        rows = np.flatnonzero(self._fully_searched_rows)
        order = np.argsort(self.table.columns.needed_bytes[rows], kind="stable")[:REFINED]
        return [self.table.candidate(int(row)).strategy for row in rows[order]]

    @property
    def _fully_searched_rows(self) -> Bools:
        """Mask of the rows whose degrees were searched in full, not only probed."""
        layouts = self.table.layouts
        wanted = [n for n, one in enumerate(layouts) if any(p.divides(one) for p in self.degrees)]
        searched: Bools = np.isin(self.table.columns.layout, wanted)
        return searched

    def _variants(self) -> Iterator[Strategy]:
        """Variants of the fastest strategies in prefetch, blocks per unit and reduce dtype.

        More prefetch or larger units may be faster. For strategies that nearly fit also less
        prefetch, with which they may fit.
        """
        space = self.space
        usual = min(space.prefetch, key=lambda depth: abs(depth - 1))
        more = [depth for depth in space.prefetch if depth >= usual]
        less = [depth for depth in space.prefetch if depth <= usual]
        nearly = self._fastest(1.0, 1.1, REFINED) if self.fitting else self._smallest()
        fast = [*self._fastest(0.0, 1.0, REFINED), *nearly]
        yield from self._with_changed_prefetch(fast, more, space.blocks_per_unit)
        yield from self._with_changed_prefetch(nearly, less, space.blocks_per_unit[:1])

    def _with_changed_prefetch(
        self, strategies: Iterable[Strategy], prefetch: Sequence[int], blocks: Sequence[int]
    ) -> Iterator[Strategy]:
        """Each sharded strategy with all of these prefetches, unit sizes and reduce dtypes."""
        for strategy in strategies:
            if not strategy.sharded or strategy.mesh.states == 1:
                continue
            dtypes = self.space.reduce_dtypes or (strategy.reduce_dtype,)
            for depth, size, dtype in product(prefetch, blocks, dtypes):
                changed = strategy.but(prefetch=depth, blocks_per_unit=size, reduce_dtype=dtype)
                if changed != strategy and self.space.allows(changed):
                    yield changed

    def _with_forward_prefetch(self) -> Iterator[Strategy]:
        """The fastest strategies with the other values of forward prefetch."""
        fastest = self._fastest(0.0, 1.0, PREFETCHED)
        for strategy, forward in product(fastest, self.space.forward_prefetch):
            changed = strategy.but(forward_prefetch=forward)
            if strategy.sharded and changed != strategy and self.space.allows(changed):
                yield changed


def _units_key(strategy: Strategy) -> tuple[object, ...]:
    """A key that is equal for strategies with the same model units."""
    return strategy.autocast, strategy.blocks_per_unit, Degrees.of(strategy)


def _recompute_order(policy: Recompute) -> float:
    """Sort key of recompute policies: 0 for none to 1 for full."""
    if isinstance(policy, float):
        return policy
    return {"none": 0.0, "selective": 0.1}.get(policy, 1.0)
