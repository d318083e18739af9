"""Split the time of a step into four parts that sum to the window.

With K the compute spans, C communication, M copies, U(·) the union over all lanes of a device and T
the window: compute = |U(K)|, exposed communication = |U(C) \\ U(K)|, exposed copies =
|(U(M) \\ U(K)) \\ U(C)|, idle = T - |U(K, C, M)|.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.step.intervals import Nanoseconds, merge, overlap_length, uncovered_length, union
from shardwise.step.spans import Kind, Timeline


class Breakdown(NamedTuple):
    """Nanoseconds of a window by kind of work; the first four fields sum to `window_ns`."""

    compute_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int
    idle_ns: int
    window_ns: int
    communication_ns: int
    overlapped_ns: int

    @property
    def overlap(self) -> float | None:
        """Share of communication hidden behind compute; None without communication."""
        return self.overlapped_ns / self.communication_ns if self.communication_ns else None


def breakdown(timeline: Timeline, window: tuple[int, int] | None = None) -> Breakdown:
    """Split a window (begin, end) in nanoseconds, by default the full timeline, into four parts."""
    begin, end = window or timeline.window
    start = np.clip(timeline.start_ns, begin, end)
    stop = np.clip(timeline.end_ns, begin, end)

    def covered(kind: Kind) -> tuple[Nanoseconds, Nanoseconds]:
        chosen = timeline.of_kind(kind)
        return start[chosen], stop[chosen]

    compute = union(*covered("compute"))
    communication = union(*covered("communication"))
    copies = union(*covered("copy"))
    busy = merge(compute, communication)
    return Breakdown(
        compute_ns=compute.length,
        exposed_communication_ns=uncovered_length(communication, compute),
        exposed_copy_ns=uncovered_length(copies, busy),
        idle_ns=end - begin - merge(busy, copies).length,
        window_ns=end - begin,
        communication_ns=communication.length,
        overlapped_ns=overlap_length(communication, compute),
    )
