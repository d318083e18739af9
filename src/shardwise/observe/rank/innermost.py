"""Nested events of a thread, flattened: every instant belongs to the innermost one.

Some events claim what happens in them: the copies that a collective's operation makes are part of
it. A claim passes to everything inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.observe.file.trace import Codes, Ints


class Pieces(NamedTuple):
    """Instants of threads: the event each belongs to, from, to, its thread, and its claim."""

    owner: Ints
    start: Ints
    end: Ints
    thread: Ints
    claim: npt.NDArray[np.int8]


def innermost(
    start: Ints, end: Ints, process: Codes, thread: Codes, claims: npt.NDArray[np.int8]
) -> Pieces:
    """Take nested events apart. `claims` are -1 where an event claims nothing."""
    _, thread_of = np.unique(np.stack([process, thread], axis=1), axis=0, return_inverse=True)
    thread_of = thread_of.reshape(-1)
    owners: list[int] = []
    marks: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    # Outer events first where several begin together.
    order = np.lexsort((-end, start, thread_of))
    claimed = claims.tolist()
    held: list[int] = []
    stack: list[int] = []
    until: list[int] = []
    position = 0
    current = -1

    def close(limit: int) -> None:
        """Let go of everything that ends by `limit`."""
        nonlocal position
        while stack and until[-1] <= limit:
            last = until.pop()
            owner, claim = stack.pop(), held.pop()
            if last > position:
                owners.append(owner)
                marks.append(claim)
                begins.append(position)
                ends.append(last)
                position = last

    starts, stops, threads = start.tolist(), end.tolist(), thread_of.tolist()
    for index in order.tolist():
        if threads[index] != current:
            close(2**63 - 1)
            current = threads[index]
            position = starts[index]
        begin = starts[index]
        close(begin)
        if stack and begin > position:
            owners.append(stack[-1])
            marks.append(held[-1])
            begins.append(position)
            ends.append(begin)
        position = max(position, begin)
        stack.append(index)
        # The outermost claim holds.
        held.append(held[-1] if held and held[-1] >= 0 else claimed[index])
        # A child that outlives its parent by a rounding error is cut.
        until.append(min(stops[index], until[-1]) if until else stops[index])
    close(2**63 - 1)
    owner = np.asarray(owners, dtype=np.int64)
    return Pieces(
        owner,
        np.asarray(begins, dtype=np.int64),
        np.asarray(ends, dtype=np.int64),
        thread_of[owner] if len(owner) else owner,
        np.asarray(marks, dtype=np.int8),
    )
