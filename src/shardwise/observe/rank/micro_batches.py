"""Micro-batches of two kinds: those that reduce gradients, and those that only accumulate."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Trace
from shardwise.observe.rank.calls import Calls
from shardwise.observe.rank.classify import names_matching
from shardwise.observe.rank.exposure import Exposed
from shardwise.observe.rank.units import ROOT, SCATTER, Purpose, annotations_of

_LABEL = re.compile(r"^shardwise::micro_batch \((no )?sync\)")
_REDUCING = ("reduce-scatter", "all-reduce")


class MicroBatches(NamedTuple):
    """All micro-batches of one kind in the trace: their number, calls and nanoseconds."""

    reduces: bool
    number: int
    gathers: int
    reductions: int
    communication_ns: int
    exposed_ns: int


def micro_batches_of(
    trace: Trace, calls: Calls, exposed: Exposed, purposes: list[Purpose]
) -> list[MicroBatches]:
    """Sums over the micro-batches of each kind; empty unless a trace has both kinds.

    A call belongs to the micro-batch in which the host issued it.
    """
    windows = _labelled(trace) or _by_root(trace, calls, purposes)
    exposed_ns = exposed.per_call(len(calls))
    gathers = np.asarray([op == "all-gather" for op in calls.operation], dtype=np.bool_)
    reductions = np.asarray([op in _REDUCING for op in calls.operation], dtype=np.bool_)
    kinds = []
    for reduces in (False, True):
        mine = np.zeros(len(calls), dtype=np.bool_)
        of_kind = [window for window in windows if window[2] == reduces]
        for begin, end, _ in of_kind:
            mine |= (calls.issued_ns >= begin) & (calls.issued_ns < end)
        if of_kind:
            kinds.append(
                MicroBatches(
                    reduces=reduces,
                    number=len(of_kind),
                    gathers=int((mine & gathers).sum()),
                    reductions=int((mine & reductions).sum()),
                    communication_ns=int(calls.duration_ns[mine].sum()),
                    exposed_ns=int(exposed_ns[mine].sum()),
                )
            )
    return kinds if len(kinds) > 1 else []


def _labelled(trace: Trace) -> list[tuple[int, int, bool]]:
    """Start and end of each micro-batch that has a label, and whether it reduces gradients."""
    rows = np.flatnonzero(
        names_matching(trace, trace.name, _LABEL) & trace.in_category("user_annotation")
    )
    return [
        (int(trace.start_ns[row]), int(trace.end_ns[row]),
         "(no sync)" not in trace.texts[trace.name[row]])
        for row in rows.tolist()
    ]  # fmt: skip


def _by_root(trace: Trace, calls: Calls, purposes: list[Purpose]) -> list[tuple[int, int, bool]]:
    """Start and end of each micro-batch by FSDP2's annotations, and whether it reduces gradients.

    A micro-batch lasts from one forward of the root unit to the next.
    """
    starts = [
        n.start_ns for n in annotations_of(trace) if n.what == "pre_forward" and n.unit == ROOT
    ]
    scatters = np.asarray(
        [issued for issued, purpose in zip(calls.issued_ns.tolist(), purposes, strict=True)
         if purpose.role == SCATTER], dtype=np.int64
    )  # fmt: skip
    edges = [*starts, int(trace.end_ns.max())]
    return [
        (begin, end, bool(((scatters >= begin) & (scatters < end)).any()))
        for begin, end in pairwise(edges)
    ]
