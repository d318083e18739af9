"""Flatten the nested events of a thread: every instant belongs to the innermost event.

An event may set the kind of everything nested inside it: the copies inside a collective's operation
belong to the collective.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.observe.file.trace import Codes, Ints


class Pieces(NamedTuple):
    """Disjoint periods of threads; `owner` is the index of the innermost event of the period.

    `kind` is inherited from an event around the period, -1 if there is none.
    """

    owner: Ints
    start: Ints
    end: Ints
    thread: Ints
    kind: npt.NDArray[np.int8]


def flatten_nested(
    start: Ints, end: Ints, process: Codes, thread: Codes, kinds: npt.NDArray[np.int8]
) -> Pieces:
    """Split events into disjoint periods. `kinds` is -1 for an event that passes on no kind."""
    _, thread_of = np.unique(np.stack([process, thread], axis=1), axis=0, return_inverse=True)
    thread_of = thread_of.reshape(-1)
    owners: list[int] = []
    piece_kinds: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    # Outer events first where several begin together.
    order = np.lexsort((-end, start, thread_of))
    own_kinds = kinds.tolist()
    inherited: list[int] = []
    stack: list[int] = []
    until: list[int] = []
    position = 0
    current = -1

    def close(limit: int) -> None:
        """Pop every event that ends by `limit`."""
        nonlocal position
        while stack and until[-1] <= limit:
            last = until.pop()
            owner, kind = stack.pop(), inherited.pop()
            if last > position:
                owners.append(owner)
                piece_kinds.append(kind)
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
            piece_kinds.append(inherited[-1])
            begins.append(position)
            ends.append(begin)
        position = max(position, begin)
        stack.append(index)
        # The outermost kind wins.
        outer = inherited[-1] if inherited else -1
        inherited.append(outer if outer >= 0 else own_kinds[index])
        # Rounding may let a child outlive its parent: cut it.
        until.append(min(stops[index], until[-1]) if until else stops[index])
    close(2**63 - 1)
    owner = np.asarray(owners, dtype=np.int64)
    return Pieces(
        owner,
        np.asarray(begins, dtype=np.int64),
        np.asarray(ends, dtype=np.int64),
        thread_of[owner] if len(owner) else owner,
        np.asarray(piece_kinds, dtype=np.int8),
    )
