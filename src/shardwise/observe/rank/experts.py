"""Passes of tokens through the experts of a rank: what lies between two all-to-alls.

An all-to-all brings tokens to their experts, another returns the outputs; the backward does the
same with gradients. The second sends what the first received, and receives what the first sent:
that tells such a pair from all other all-to-alls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import Calls
from shardwise.step.intervals import Intervals, length_before

_OPERATIONS = ("expert all-to-all", "all-to-all")


class ExpertPasses(NamedTuple):
    """Passes through the experts of a rank, ordered by call; a value per pass.

    The experts got `received` elements: tokens times their width. They computed for `compute_ns`.
    """

    # Index of the call that returns the outputs.
    call: Ints
    received: Ints
    compute_ns: Ints


def expert_passes(calls: Calls, compute: Intervals) -> ExpertPasses:
    """The passes through experts among the calls of a rank; none where the trace has no sizes."""
    first, second = _pairs(calls)
    order = np.argsort(second, kind="stable")
    first, second = first[order], second[order]
    computed = length_before(compute, calls.start_ns[second])
    computed = computed - length_before(compute, calls.end_ns[first])
    return ExpertPasses(second, calls.received[first], np.maximum(computed, 0))


def _pairs(calls: Calls) -> tuple[Ints, Ints]:
    """Indices of the calls that bring tokens, and of those that return the outputs."""
    by_group: dict[str, list[int]] = {}
    for index, (operation, key) in enumerate(zip(calls.operation, calls.key, strict=True)):
        if operation in _OPERATIONS:
            by_group.setdefault(key, []).append(index)
    sent, received = calls.sent.tolist(), calls.received.tolist()
    first, second = [], []
    for mine in by_group.values():
        opened: int | None = None
        for index in mine:
            returns = opened is not None and 0 <= sent[index] == received[opened]
            if opened is not None and returns and 0 <= received[index] == sent[opened]:
                first.append(opened)
                second.append(index)
                opened = None
            else:
                opened = index
    return np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)
