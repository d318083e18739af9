"""Match collectives across ranks: transfer time, waiting time, and the rank waited for.

The kernel of a collective spins until the last rank arrives. Its shortest duration over the ranks
of the group is the transfer; anything beyond that is waiting for the rank that started last. Memory
and time grow linearly with the number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import Calls


class JoinedCollectives(NamedTuple):
    """Calls of collectives seen by at least two ranks, grouped by collective.

    Columns have a value per call; `offset_ns` and `unmatched` have one per rank.
    """

    # Number of the collective that the call is part of, ascending from 0.
    collective: Ints
    rank: Ints
    # Index among the rank's calls.
    call: Ints
    start_ns: Ints
    end_ns: Ints
    # Add to a rank's clock to align it with the first rank's.
    offset_ns: Ints
    # Number of calls that no other rank has.
    unmatched: list[int]

    @property
    def collectives(self) -> int:
        """Number of matched collectives."""
        return int(self.collective[-1]) + 1 if len(self.collective) else 0

    @property
    def duration_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    @property
    def transfers_ns(self) -> Ints:
        """Transfer nanoseconds of each collective: its shortest duration over the ranks."""
        shortest: Ints = np.minimum.reduceat(self.duration_ns, _first_rows(self.collective))
        return shortest

    @property
    def transfer_ns(self) -> int:
        """Transfer nanoseconds summed over all collectives."""
        return int(self.transfers_ns.sum())

    @property
    def mean_ns(self) -> float:
        """Nanoseconds that a rank spends in matched calls, mean over ranks."""
        return float(self.duration_ns.sum()) / len(self.unmatched)

    @property
    def last_rank(self) -> Ints:
        """Index of the rank that started each collective last, on a common clock."""
        start = self.start_ns + self.offset_ns[self.rank]
        order = np.lexsort((-self.rank, start, self.collective))
        ends = np.append(_first_rows(self.collective)[1:], len(order)) - 1
        last: Ints = self.rank[order[ends]]
        return last

    def last_to_arrive(self) -> Ints:
        """Number of collectives at which each rank arrived last.

        Collectives in which no rank waited do not count.
        """
        longest = np.maximum.reduceat(self.duration_ns, _first_rows(self.collective))
        waited = longest > self.transfers_ns
        return np.bincount(self.last_rank[waited], minlength=len(self.unmatched))

    def by_rank(self) -> list[Ints]:
        """Row indices of the calls of each rank, one array per rank."""
        order = np.argsort(self.rank, kind="stable")
        edges = np.searchsorted(self.rank[order], np.arange(1, len(self.unmatched)))
        return np.split(order, edges)

    def transfers_of(self, counts: Sequence[int]) -> list[Ints]:
        """Transfer nanoseconds of every call, one array per rank; -1 for an unmatched call.

        `counts` is the number of calls of each rank.
        """
        transfers = self.transfers_ns
        columns = []
        for mine, count in zip(self.by_rank(), counts, strict=True):
            column = np.full(count, -1, dtype=np.int64)
            column[self.call[mine]] = transfers[self.collective[mine]]
            columns.append(column)
        return columns


def _first_rows(collective: Ints) -> Ints:
    """Index of the first row of each collective."""
    return np.flatnonzero(np.diff(collective, prepend=-1))


def join_collectives(ranks: Sequence[Calls]) -> JoinedCollectives:
    """Match collectives across ranks: the n-th calls with the same key are one collective.

    All ranks of a group issue its collectives in the same order.
    """
    numbers: dict[tuple[str, int], int] = {}
    collective: list[int] = []
    for calls in ranks:
        seen: dict[str, int] = {}
        for key in calls.key:
            position = seen.get(key, 0)
            seen[key] = position + 1
            collective.append(numbers.setdefault((key, position), len(numbers)))
    shared = np.asarray(collective, dtype=np.int64)
    counts = [len(calls) for calls in ranks]
    rank = np.repeat(np.arange(len(ranks)), counts)
    call = np.concatenate([np.arange(count) for count in counts])
    start = np.concatenate([calls.start_ns for calls in ranks])
    end = np.concatenate([calls.end_ns for calls in ranks])
    partners = np.bincount(shared, minlength=1)[shared] if len(shared) else shared
    order = np.argsort(shared, kind="stable")
    order = order[partners[order] > 1]
    _, renumbered = np.unique(shared[order], return_inverse=True)
    renumbered = renumbered.reshape(-1).astype(np.int64)
    unmatched = np.bincount(rank[partners < 2], minlength=len(ranks)).tolist()
    offset = _offsets(renumbered, rank[order], end[order], len(ranks))
    return JoinedCollectives(
        renumbered, rank[order], call[order], start[order], end[order], offset, unmatched
    )


def _offsets(collective: Ints, rank: Ints, end: Ints, ranks: int) -> Ints:
    """Nanoseconds to add to the clock of each rank, since a collective ends on all ranks at once.

    Ranks that share no collective with the first are aligned through others; a rank that shares
    none keeps its own clock.
    """
    offset = np.zeros(ranks, dtype=np.int64)
    known = np.zeros(ranks, dtype=np.bool_)
    known[:1] = True
    while len(collective):
        aligned = known[rank]
        if aligned.all():
            break
        # End of each collective on the common clock, by the first aligned rank.
        reference = np.full(int(collective[-1]) + 1, -1, dtype=np.int64)
        reference[collective[aligned][::-1]] = (end + offset[rank])[aligned][::-1]
        usable = np.flatnonzero(~aligned & (reference[collective] >= 0))
        if not len(usable):
            break
        usable = usable[np.argsort(rank[usable], kind="stable")]
        for mine in np.split(usable, np.flatnonzero(np.diff(rank[usable])) + 1):
            new = rank[mine[0]]
            offset[new] = round(float(np.median(reference[collective[mine]] - end[mine])))
            known[new] = True
    return offset
