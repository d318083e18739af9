"""The events of a step: what a device runs, waits for and holds, in the order it is issued.

A program is a sequence of events. Every amount of memory or traffic is a column: one number for
each configuration (row) that shares the program. Events hold no seconds: they name a cost, and
`Prices` gives its seconds on given hardware. Four modules read programs: memory, traffic, time and
replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Floats, Ints

# What memory is held for.
TERMS = (
    "parameters",
    "gradients",
    "optimizer",
    "reference",
    "generation",
    "unsharded_parameters",
    "unsharded_gradients",
    "reduce_buffers",
    "activations",
    "logits",
    "other",
)
# Terms that few runs have; a profile lists them only where they are not 0.
RARE_TERMS = ("reference", "generation")
PHASES = (
    "forward",
    "end of forward",
    "loss backward",
    "steady backward",
    "last backward",
    "optimizer step",
)
WorkKind = Literal[
    "compute", "copy", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "optimizer"
]
COMMUNICATION: tuple[WorkKind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
# Index of the unit that holds embedding, head and loss.
ROOT_UNIT = -1


class Message(NamedTuple):
    """Bytes and calls of a collective: the full group's message, padding included."""

    axis: str
    bytes: Ints
    calls: int | Ints = 1


class Cost(NamedTuple):
    """The cost of an event: the name of a method of `Prices`, and its arguments."""

    piece: str
    of: tuple[Any, ...] = ()


NO_COST = Cost("nothing")


class Run(NamedTuple):
    """Work that takes time on a stream and starts when everything named in `after` is done.

    `after` names streams (everything issued on them so far) and marks. `give` appends the end time
    to a queue; `take` removes the first time of a queue and waits for that. `mark` is a name under
    which the end time is stored. Work overlapped by the streams in `beside` is slowed. Only the
    rows in `only` do the work; None stands for all rows.
    """

    stream: str
    work: WorkKind
    name: str
    unit: int
    cost: Cost
    after: tuple[str, ...] = ()
    take: str = ""
    give: str = ""
    mark: str = ""
    beside: tuple[str, ...] = ()
    only: Bools | None = None
    message: Message | None = None


class Wait(NamedTuple):
    """A stream waits for everything issued so far on other streams, and for marks."""

    stream: str
    after: tuple[str, ...]


class Alloc(NamedTuple):
    """Bytes of a memory term that stay allocated; a negative size frees memory."""

    term: str
    bytes: Floats


class Instant(NamedTuple):
    """A moment at which memory may peak: everything allocated, plus `also` for this moment only."""

    also: tuple[Alloc, ...] = ()


class Phase(NamedTuple):
    """Start of a phase of the step, one of PHASES."""

    name: str


class Repeat(NamedTuple):
    """A body of events that is repeated `times` times, by row; 0 skips it in that row."""

    body: tuple[Event, ...]
    times: Ints


def only_in_rows(rows: Bools, body: Iterable[Event]) -> Iterator[Event]:
    """Events that happen only in some rows, given by a mask."""
    if rows.all():
        yield from body
    elif rows.any():
        yield Repeat(tuple(body), rows.astype(np.int64))


Event = Run | Wait | Alloc | Instant | Phase | Repeat
Program = Sequence[Event]


def without_memory_events(program: Program) -> Program:
    """The program without memory events: only Run, Wait and Repeat."""
    return tuple(
        Repeat(tuple(without_memory_events(event.body)), event.times)
        if type(event) is Repeat
        else event
        for event in program
        if type(event) in (Run, Wait, Repeat)
    )


def structure_key(program: Program) -> tuple[object, ...]:
    """A key that programs must share to be joined: all but columns, costs and unit indices."""
    return tuple(_structure(event) for event in program)


def _structure(event: Event) -> object:
    if isinstance(event, Repeat):
        return structure_key(event.body)
    if isinstance(event, Instant):
        return tuple(also.term for also in event.also)
    if isinstance(event, Alloc):
        return event.term
    if isinstance(event, Run):
        message = None if event.message is None else event.message.axis
        return event._replace(unit=ROOT_UNIT, cost=None, only=event.only is None, message=message)  # type: ignore[arg-type]
    return event


def join_programs(programs: Sequence[Program]) -> Program:
    """Concatenate programs of the same structure into one program with all their rows."""
    return tuple(_join_values(events) for events in zip(*programs, strict=True))


def _join_values(values: tuple[Any, ...]) -> Any:
    """One event of several programs as one, its columns concatenated; the rest is the first's."""
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, tuple):
        parts = [_join_values(parts) for parts in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first
