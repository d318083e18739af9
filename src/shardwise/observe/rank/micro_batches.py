"""Micro-batches of a step, those that reduce gradients told from those that only add them up."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Trace
from shardwise.observe.rank.calls import Calls
from shardwise.observe.rank.classify import named
from shardwise.observe.rank.exposure import Exposed
from shardwise.observe.rank.units import ROOT, SCATTER, Place, notes_of

_LABEL = re.compile(r"^shardwise::micro_batch \((no )?sync\)")
_REDUCING = ("reduce-scatter", "all-reduce")


class MicroBatches(NamedTuple):
    """All micro-batches of one kind, over the whole trace."""

    reduces: bool
    number: int
    gathers: int
    reductions: int
    communication_ns: int
    exposed_ns: int


def micro_batches_of(
    trace: Trace, calls: Calls, exposed: Exposed, places: list[Place]
) -> list[MicroBatches]:
    """Both kinds, where a trace has both; a call belongs to the micro-batch that asked for it."""
    windows = _labelled(trace) or _by_root(trace, calls, places)
    alone = exposed.per_call(len(calls))
    gathers = np.asarray([op == "all-gather" for op in calls.operation], dtype=np.bool_)
    reductions = np.asarray([op in _REDUCING for op in calls.operation], dtype=np.bool_)
    found = []
    for reduces in (False, True):
        mine = np.zeros(len(calls), dtype=np.bool_)
        of_kind = [window for window in windows if window[2] == reduces]
        for begin, end, _ in of_kind:
            mine |= (calls.asked_ns >= begin) & (calls.asked_ns < end)
        if of_kind:
            found.append(
                MicroBatches(
                    reduces=reduces,
                    number=len(of_kind),
                    gathers=int((mine & gathers).sum()),
                    reductions=int((mine & reductions).sum()),
                    communication_ns=int(calls.lasted_ns[mine].sum()),
                    exposed_ns=int(alone[mine].sum()),
                )
            )
    return found if len(found) > 1 else []


def _labelled(trace: Trace) -> list[tuple[int, int, bool]]:
    rows = np.flatnonzero(named(trace, trace.name, _LABEL) & trace.in_category("user_annotation"))
    return [
        (int(trace.start_ns[row]), int(trace.end_ns[row]),
         "(no sync)" not in trace.texts[trace.name[row]])
        for row in rows.tolist()
    ]  # fmt: skip


def _by_root(trace: Trace, calls: Calls, places: list[Place]) -> list[tuple[int, int, bool]]:
    """From one forward of the root to the next; one that reduces a unit's gradients reduces."""
    starts = [n.start_ns for n in notes_of(trace) if n.what == "pre_forward" and n.unit == ROOT]
    scatters = np.asarray(
        [asked for asked, place in zip(calls.asked_ns.tolist(), places, strict=True)
         if place.role == SCATTER], dtype=np.int64
    )  # fmt: skip
    edges = [*starts, int(trace.end_ns.max())]
    return [
        (begin, end, bool(((scatters >= begin) & (scatters < end)).any()))
        for begin, end in pairwise(edges)
    ]
