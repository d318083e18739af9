"""Ranks joined: what a collective moved, what it waited, and for whom.

The kernel of a collective spins until the last rank arrives. Its shortest run over the ranks of
its group is the transfer; the rest of every other one is waiting, and the rank that began last
kept the others. Nothing here grows with more than the number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import Calls


class Joined(NamedTuple):
    """Calls that at least two ranks share, those of one collective together.

    A value per call, but for `offset_ns` and `unmatched`, which have one per rank.
    """

    collective: Ints
    rank: Ints
    # Which of the rank's calls it is.
    call: Ints
    start_ns: Ints
    end_ns: Ints
    # Added to a rank's clock to make its ends agree with those of the first rank.
    offset_ns: Ints
    # Calls without a partner.
    unmatched: list[int]

    @property
    def collectives(self) -> int:
        return int(self.collective[-1]) + 1 if len(self.collective) else 0

    @property
    def lasted_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    @property
    def transfers_ns(self) -> Ints:
        """Of each collective."""
        shortest: Ints = np.minimum.reduceat(self.lasted_ns, _first(self.collective))
        return shortest

    @property
    def transfer_ns(self) -> int:
        return int(self.transfers_ns.sum())

    @property
    def mean_ns(self) -> float:
        """Matched calls of the average rank."""
        return float(self.lasted_ns.sum()) / len(self.unmatched)

    @property
    def last_rank(self) -> Ints:
        """Of each collective the rank that the others waited for, on a common clock."""
        begun = self.start_ns + self.offset_ns[self.rank]
        order = np.lexsort((-self.rank, begun, self.collective))
        ends = np.append(_first(self.collective)[1:], len(order)) - 1
        last: Ints = self.rank[order[ends]]
        return last

    def last_to_arrive(self) -> Ints:
        """How often each rank was the one the others waited for; together nobody is."""
        longest = np.maximum.reduceat(self.lasted_ns, _first(self.collective))
        waited = longest > self.transfers_ns
        return np.bincount(self.last_rank[waited], minlength=len(self.unmatched))

    def by_rank(self) -> list[Ints]:
        """Of each rank, where its calls are."""
        order = np.argsort(self.rank, kind="stable")
        edges = np.searchsorted(self.rank[order], np.arange(1, len(self.unmatched)))
        return np.split(order, edges)

    def transfers_of(self, counts: Sequence[int]) -> list[Ints]:
        """Of each rank the transfer of each of its calls; -1 where that has no partner."""
        transfers = self.transfers_ns
        found = []
        for mine, count in zip(self.by_rank(), counts, strict=True):
            column = np.full(count, -1, dtype=np.int64)
            column[self.call[mine]] = transfers[self.collective[mine]]
            found.append(column)
        return found


def _first(collective: Ints) -> Ints:
    return np.flatnonzero(np.diff(collective, prepend=-1))


def join(ranks: Sequence[Calls]) -> Joined:
    """Match calls of the same key in the same place: every rank of a group issues them in order."""
    numbers: dict[tuple[str, int], int] = {}
    collective: list[int] = []
    for calls in ranks:
        seen: dict[str, int] = {}
        for key in calls.key:
            place = seen.get(key, 0)
            seen[key] = place + 1
            collective.append(numbers.setdefault((key, place), len(numbers)))
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
    return Joined(renumbered, rank[order], call[order], start[order], end[order], offset, unmatched)


def _offsets(collective: Ints, rank: Ints, end: Ints, ranks: int) -> Ints:
    """What to add to each clock. A collective ends everywhere at once.

    Ranks that share nothing with the first are reached through others; what is never reached
    keeps its own clock.
    """
    offset = np.zeros(ranks, dtype=np.int64)
    known = np.zeros(ranks, dtype=np.bool_)
    known[:1] = True
    while len(collective):
        told = known[rank]
        if told.all():
            break
        # The end of each collective on the common clock, by the first rank known to have seen it.
        reference = np.full(int(collective[-1]) + 1, -1, dtype=np.int64)
        reference[collective[told][::-1]] = (end + offset[rank])[told][::-1]
        usable = np.flatnonzero(~told & (reference[collective] >= 0))
        if not len(usable):
            break
        usable = usable[np.argsort(rank[usable], kind="stable")]
        for mine in np.split(usable, np.flatnonzero(np.diff(rank[usable])) + 1):
            new = rank[mine[0]]
            offset[new] = round(float(np.median(reference[collective[mine]] - end[mine])))
            known[new] = True
    return offset
