"""Ranks joined: what a collective moved, what it waited, and for whom.

The kernel of a collective spins until the last rank arrives. Its shortest kernel over all ranks is
the transfer; the rest of every other one is waiting, and the rank that began last kept the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.observe.trace import Ints
from shardwise.timeline.spans import Timeline


class Joined(NamedTuple):
    """Collectives that all ranks took part in, one column each; a row per rank."""

    start_ns: Ints
    end_ns: Ints
    # Added to a rank's clock to make its ends agree with those of the first rank.
    offset_ns: Ints
    # Collectives that could not be matched, per rank.
    unmatched: list[int]

    @property
    def duration_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    @property
    def transfer_ns(self) -> int:
        return int(self.duration_ns.min(axis=0).sum())

    @property
    def waiting_ns(self) -> Ints:
        """Per rank."""
        waits: Ints = (self.duration_ns - self.duration_ns.min(axis=0)).sum(axis=1)
        return waits

    @property
    def mean_ns(self) -> float:
        """Communication kernels of the average rank."""
        return float(self.duration_ns.sum(axis=1).mean())

    def last_to_arrive(self) -> npt.NDArray[np.int64]:
        """How often each rank was the one the others waited for, on a common clock."""
        ranks = (self.start_ns + self.offset_ns[:, None]).argmax(axis=0)
        return np.bincount(ranks, minlength=len(self.start_ns))


def join(timelines: Sequence[Timeline]) -> Joined:
    """Match the n-th collective of every stream; streams by the order of their first use.

    Every rank issues the collectives of a process group in the same order, and a process group has
    a stream of its own.
    """
    per_rank = [_by_lane(timeline) for timeline in timelines]
    lanes = min(len(found) for found in per_rank)
    starts: list[list[Ints]] = [[] for _ in timelines]
    ends: list[list[Ints]] = [[] for _ in timelines]
    unmatched = [sum(len(s) for s, _ in found) for found in per_rank]
    for lane in range(lanes):
        count = min(len(found[lane][0]) for found in per_rank)
        for rank, found in enumerate(per_rank):
            start, end = found[lane]
            starts[rank].append(start[:count])
            ends[rank].append(end[:count])
            unmatched[rank] -= count
    start = np.stack([np.concatenate(s) if s else np.empty(0, np.int64) for s in starts])
    end = np.stack([np.concatenate(e) if e else np.empty(0, np.int64) for e in ends])
    offset = np.zeros(len(timelines), dtype=np.int64)
    if end.shape[1]:
        offset = np.rint(np.median(end[0] - end, axis=1)).astype(np.int64)
    return Joined(start, end, offset, unmatched)


def _by_lane(timeline: Timeline) -> list[tuple[Ints, Ints]]:
    """Collectives of each lane in the order they ran, the lane first used first."""
    moving = timeline.of_kind("communication")
    found = []
    for lane in np.unique(timeline.lane[moving]).tolist():
        rows = np.flatnonzero(moving & (timeline.lane == lane))
        rows = rows[np.argsort(timeline.start_ns[rows], kind="stable")]
        found.append((timeline.start_ns[rows], timeline.end_ns[rows]))
    return sorted(found, key=lambda lane: int(lane[0][0]))
