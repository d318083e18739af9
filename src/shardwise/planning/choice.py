"""Which configuration to recommend among those that fit.

Configurations whose speeds differ by less than the comparison error count as equally fast. Among
these, the one with more headroom is recommended, then the simpler one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.planning.layout import Layout
from shardwise.planning.rows import Candidate, Table
from shardwise.predict.configurations import Floats, Ints
from shardwise.predict.estimate import verdict
from shardwise.predict.rates import comparison_error
from shardwise.spec.cluster import DeviceSpec
from shardwise.spec.strategy import Kind, Strategy
from shardwise.step.profile import Verdict

# Headroom counts up to this share of the usable memory; more headroom is not preferred.
WANTED_HEADROOM = 0.1
# Relative differences below this are not visible on a screen. A configuration that is slower by
# more than this and needs more memory is not recommended, even if it counts as equally fast.
VISIBLE = 0.005
# Added to the rank of sharding groups smaller than a node, so that they come last.
PART_OF_NODE = 2**40
# Lower-memory options differ by at least this share of the usable memory.
MEMORY_STEP = 0.05


class ClosestToFitting(NamedTuple):
    """The configuration of a layout that needs the least memory, in bytes per device."""

    strategy: Strategy
    peak_bytes: float
    needed_bytes: float

    @property
    def layout(self) -> Layout:
        return Layout.of(self.strategy)

    def verdict(self, device: DeviceSpec) -> Verdict:
        """The verdict on this configuration's memory, as in `estimate`."""
        pooled = round(self.needed_bytes - self.peak_bytes)
        return verdict(round(self.peak_bytes), device, pooled)


class SearchResult(NamedTuple):
    """The outcome of a search: its priced rows, and which of them to recommend.

    `nearest` is the configuration with the least memory of each layout. `considered` and `fitting`
    count configurations; `limit_bytes` is the usable memory of a device.
    """

    table: Table
    nearest: dict[Layout, ClosestToFitting]
    considered: int
    fitting: int
    limit_bytes: int
    devices_per_node: int

    def best(
        self, layout: Layout | None = None, *, kind: Kind | None = None, memory: float = 1.0
    ) -> Candidate | None:
        """The recommended configuration of all rows, or of one layout or kind; None if none fits.

        `memory` is how much memory it may need, as a multiple of the usable memory.
        """
        rows = self._rows(layout, kind, memory)
        return self.table.candidate(self._choice(rows, memory)) if len(rows) else None

    def _choice(self, rows: Ints, memory: float = 1.0) -> int:
        """The row to recommend: of equally fast rows, by closest batch, headroom and simplicity."""
        columns = self.table.columns
        equal = self._equally_fast(rows)
        rows, equal = (self._closest(which, equal) for which in (rows, equal))
        roomiest = self._headroom(columns.needed_bytes[equal], memory).max()
        rows = rows[self._headroom(columns.needed_bytes[rows], memory) >= roomiest]
        return self._simplest(self._undominated(self._equally_fast(rows)))

    def _closest(self, rows: Ints, equal: Ints) -> Ints:
        """The rows whose batch is as close to the request as the closest of the `equal` rows.

        Only rows with the same number of devices per sequence are compared: a closer batch is no
        reason to use more tensor or context parallelism.
        """
        away, inner = self.table.columns.distance, self._inner
        closest = np.full(int(inner.max()) + 1, -1.0)
        for degree in sorted(set(inner[equal].tolist())):
            closest[degree] = away[equal[inner[equal] == degree]].min() + 1e-9
        kept: Ints = rows[away[rows] <= closest[inner[rows]]]
        return kept

    @property
    def _inner(self) -> Ints:
        """Number of devices that share a sequence (tensor × context degree), by row."""
        inner: Ints = np.asarray([one.mesh.inner for one in self.table.layouts], dtype=np.int64)
        return inner[self.table.columns.layout]

    def _equally_fast(self, rows: Ints) -> Ints:
        """The rows whose speed is within the comparison error of the fastest of `rows`."""
        speed = self.table.columns.tokens_per_s[rows]
        equal: Ints = rows[speed >= (1 - comparison_error()) * speed.max()]
        return equal

    def _headroom(self, needed: Floats, memory: float = 1.0) -> Floats:
        """Free share of the usable memory, rounded down to a percent, at most WANTED_HEADROOM."""
        usable = self.limit_bytes * max(memory, 1.0)
        free: Floats = np.floor(100 * (1 - needed / usable)) / 100
        return np.minimum(free, WANTED_HEADROOM)

    def _undominated(self, rows: Ints) -> Ints:
        """The rows that no other row beats both in speed and in memory.

        Only rows with the same number of devices per sequence are compared: a small gain in both is
        no reason to use more tensor or context parallelism.
        """
        columns, inner = self.table.columns, self._inner[rows]
        kept = []
        for degree in sorted(set(inner.tolist())):
            alike = rows[inner == degree]
            ordered = alike[np.argsort(columns.needed_bytes[alike], kind="stable")]
            speed = columns.tokens_per_s[ordered]
            kept.append(ordered[speed * (1 + VISIBLE) >= np.maximum.accumulate(speed)])
        return np.concatenate(kept)

    def _simplest(self, rows: Ints) -> int:
        """The index of the fastest of the simplest rows; of equally fast ones, the smallest groups.

        Fewer devices per sequence are simpler, and groups of full nodes come first.
        """
        columns, layouts = self.table.columns, self.table.layouts
        ranks = np.asarray([group_rank(one, self.devices_per_node) for one in layouts])
        ranks, inner = ranks[columns.layout[rows]], self._inner[rows]
        # Groups smaller than a node make a configuration less simple.
        complexity = columns.complexity[rows] + (ranks >= PART_OF_NODE)
        first = np.lexsort((inner, complexity))[0]
        simple = (complexity == complexity[first]) & (inner == inner[first])
        speed = columns.tokens_per_s[rows]
        fastest = simple & (speed * (1 + VISIBLE) >= speed[simple].max())
        order = np.lexsort((-speed[fastest], ranks[fastest]))
        return int(rows[fastest][order[0]])

    def headroom(self, candidate: Candidate) -> float:
        """A candidate's free share of the usable memory, at most WANTED_HEADROOM."""
        return float(self._headroom(np.asarray([candidate.needed_bytes]))[0])

    def is_tight(self, candidate: Candidate) -> bool:
        """Whether a candidate leaves less than the wanted headroom."""
        return self.headroom(candidate) < WANTED_HEADROOM

    def fastest(self, memory: float = 1.0) -> Candidate | None:
        """The fastest configuration that fits, whatever its headroom, simplicity or batch.

        `memory` is how much memory it may need, as a multiple of the usable memory.
        """
        rows = self._rows(None, None, memory)
        if not len(rows):
            return None
        return self.table.candidate(int(rows[self.table.columns.tokens_per_s[rows].argmax()]))

    def smallest(self, at_least: float) -> Candidate | None:
        """The configuration with the least memory of those with at least `at_least` tokens/s."""
        columns = self.table.columns
        rows = self._rows(None, None, 1.0)
        rows = rows[columns.tokens_per_s[rows] >= at_least]
        if not len(rows):
            return None
        needed = columns.needed_bytes[rows]
        rows = rows[needed <= needed.min() + 1.0]
        order = np.lexsort((-columns.tokens_per_s[rows], columns.complexity[rows]))
        return self.table.candidate(int(rows[order[0]]))

    def lower_memory(self, winner: Candidate, most: int = 3) -> list[Candidate]:
        """Up to `most` recommended configurations with less and less memory than the winner."""
        found: list[Candidate] = []
        needed = winner.needed_bytes
        while len(found) < most and self.limit_bytes:
            # Each step is at least a few percent of the usable memory, so that options differ.
            memory = min(needed / self.limit_bytes - MEMORY_STEP, 0.85 * needed / self.limit_bytes)
            rows = self._rows(None, None, memory)
            if not len(rows):
                break
            found.append(self.table.candidate(self._choice(rows)))
            needed = found[-1].needed_bytes
        return found

    def layouts(self) -> list[Candidate]:
        """The best configuration of each layout that fits, the fastest first."""
        each = (self.best(layout) for layout in self.table.layouts)
        return sorted((c for c in each if c), key=lambda c: -c.tokens_per_s)

    def rejected(self) -> list[ClosestToFitting]:
        """For each layout that does not fit, its least memory configuration, the closest first."""
        misses = [n for n in self.nearest.values() if n.needed_bytes > self.limit_bytes]
        return sorted(misses, key=lambda n: n.needed_bytes)

    def closest_of_kind(self, kind: Kind) -> ClosestToFitting | None:
        """The configuration of a kind that needs the least memory; None if none was priced."""
        found = [n for n in self.nearest.values() if n.layout.kind == kind]
        return min(found, key=lambda n: n.needed_bytes) if found else None

    def _rows(self, layout: Layout | None, kind: Kind | None, memory: float) -> Ints:
        """Indices of the rows of a layout and kind (None: any) that fit in `memory` × usable."""
        columns = self.table.columns
        wanted = [
            (layout is None or one == layout) and (kind is None or one.kind == kind)
            for one in self.table.layouts
        ]
        fits = columns.needed_bytes <= self.limit_bytes * memory
        rows: Ints = np.flatnonzero(fits & np.asarray(wanted, dtype=bool)[columns.layout])
        return rows


def group_rank(layout: Layout, devices_per_node: int) -> int:
    """Sort key of sharding groups: full nodes first, the smallest first, then parts of a node."""
    shard = layout.mesh.shard
    whole = shard >= devices_per_node or shard == 1
    return shard if whole else 2 * PART_OF_NODE - shard
