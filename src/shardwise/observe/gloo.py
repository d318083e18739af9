"""Collectives of a CPU run: Gloo's events, each beside the operation that asked for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.observe.trace import Ints, Trace

_BACKENDS = ("gloo:", "mpi:", "ucc:")


class GlooCalls(NamedTuple):
    """Rows of the backend's threads, and of torch.distributed's operations in the same order.

    A trace has no link between the two but order. `asked` is None where their numbers differ.
    """

    carried: Ints
    asked: Ints | None


def gloo_calls(trace: Trace) -> GlooCalls:
    """Gloo carries out a reduce-scatter as an all-reduce: only `asked` tells what it was."""
    carried, asked = _named(trace, _BACKENDS), _named(trace, ("c10d::",))
    return GlooCalls(carried, asked if len(asked) == len(carried) else None)


def _named(trace: Trace, starts: tuple[str, ...]) -> Ints:
    """Rows whose name begins like this, in the order in which they began."""
    matches = np.asarray([text.startswith(starts) for text in trace.texts], dtype=np.bool_)
    rows = np.flatnonzero(matches[trace.name])
    return rows[np.argsort(trace.start_ns[rows], kind="stable")]
