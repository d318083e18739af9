"""Read the collectives of a step from its program: calls and bytes.

`bytes` follow one rule: the whole group's message (all-gather output, reduce-scatter input,
all-reduce tensor), summed over the calls, padding included as FSDP2 pads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Configurations, Ints
from shardwise.predict.program.events import Program, Repeat, Run
from shardwise.predict.program.step import emit_steps
from shardwise.units.unit import ModelUnits


class Collective(NamedTuple):
    """One kind of collective on one axis of the mesh, per configuration."""

    op: str
    group: str
    calls: Ints
    bytes: Ints


def predict_traffic(units: ModelUnits, c: Configurations) -> list[Collective]:
    """The collectives that one rank takes part in per step, by operation and device mesh group."""
    found: dict[tuple[str, str], Collective] = {}
    for part in emit_steps(units, c).parts:
        rows = part.rows
        for one in collectives(part.program, len(rows)):
            key = (one.op, one.group)
            if key not in found:
                found[key] = Collective(*key, *np.zeros((2, len(c)), dtype=np.int64))
            found[key].calls[rows] = one.calls
            found[key].bytes[rows] = one.bytes
    return list(found.values())


def collectives(program: Program, rows: int) -> list[Collective]:
    """Calls and bytes of a program's collectives, summed by operation and group.

    `rows` is the number of configurations of the program.
    """
    found: dict[tuple[str, str], Collective] = {}

    def add(events: Program, times: Ints) -> None:
        for event in events:
            if isinstance(event, Repeat):
                add(event.body, times * event.times)
            elif isinstance(event, Run) and event.message is not None:
                message = event.message
                key = (event.work.replace("-", "_"), message.axis)
                sums = found.get(key) or Collective(*key, *np.zeros((2, rows), dtype=np.int64))
                often = times if event.only is None else times * event.only
                calls, total = often * message.calls, often * message.bytes
                found[key] = sums._replace(calls=sums.calls + calls, bytes=sums.bytes + total)

    add(program, np.ones(rows, dtype=np.int64))
    return [one for one in found.values() if one.calls.any()]
