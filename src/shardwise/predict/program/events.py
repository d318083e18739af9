"""The events of a step: what a device runs, waits for and holds, in the order it is issued.

A program is a sequence of events. Every amount of memory or traffic is a column: one number for
each configuration that shares the program. Seconds are not in it: events name their cost, and
prices say what that is on some hardware. Four readers read it: memory, traffic, time and replay.
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
    "unsharded_parameters",
    "unsharded_gradients",
    "reduce_buffers",
    "activations",
    "logits",
    "other",
)
PHASES = (
    "forward",
    "end of forward",
    "loss backward",
    "steady backward",
    "last backward",
    "optimizer step",
)
Work = Literal[
    "compute", "copy", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "optimizer"
]
COMMUNICATION: tuple[Work, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
# Streams of collectives inside blocks, for which compute waits.
INSIDE: tuple[Literal["tensor", "context"], ...] = ("tensor", "context")
# Index of the unit that holds embedding, head and loss.
ROOT = -1


class Message(NamedTuple):
    """What a collective moves: the whole group's message, padding included."""

    axis: str
    bytes: Ints
    calls: int | Ints = 1


class Cost(NamedTuple):
    """What a reader of time asks the prices for: a piece of the step, by name, of these things."""

    piece: str
    of: tuple[Any, ...] = ()


NOTHING = Cost("nothing")


class Run(NamedTuple):
    """Something that takes time on a stream, from when everything named in `after` is done.

    `after` names streams (all that was issued on them so far) and marks. `give` puts the end into a
    queue and `take` waits for the first in it; `mark` remembers the end of the last of its kind.
    Compute is slowed by what runs on the streams in `beside`. Rows not in `only` do nothing.
    """

    stream: str
    work: Work
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
    """A stream goes on only when others, and marks, have come this far."""

    stream: str
    after: tuple[str, ...]


class Alloc(NamedTuple):
    """Memory that stays until it is freed; a negative size frees."""

    term: str
    bytes: Floats


class Instant(NamedTuple):
    """A moment at which memory may be largest: what is alive, and for this moment `also`."""

    also: tuple[Alloc, ...] = ()


class Phase(NamedTuple):
    """The part of the step that begins here, for a reader's table."""

    name: str


class Repeat(NamedTuple):
    """Events that follow one another so many `times`; not at all in a row where that is 0."""

    body: tuple[Event, ...]
    times: Ints


def where(rows: Bools, body: Iterable[Event]) -> Iterator[Event]:
    """Events of some rows only."""
    if rows.all():
        yield from body
    elif rows.any():
        yield Repeat(tuple(body), rows.astype(np.int64))


Event = Run | Wait | Alloc | Instant | Phase | Repeat
Program = Sequence[Event]


def timed(program: Program) -> Program:
    """The events that take time or wait."""
    return tuple(
        Repeat(tuple(timed(event.body)), event.times) if type(event) is Repeat else event
        for event in program
        if type(event) in (Run, Wait, Repeat)
    )


def structure(program: Program) -> tuple[object, ...]:
    """What programs must have in common to be joined: all but columns and the place of units."""
    return tuple(_structure(event) for event in program)


def _structure(event: Event) -> object:
    if isinstance(event, Repeat):
        return structure(event.body)
    if isinstance(event, Instant):
        return tuple(also.term for also in event.also)
    if isinstance(event, Alloc):
        return event.term
    if isinstance(event, Run):
        message = None if event.message is None else event.message.axis
        return event._replace(unit=ROOT, cost=None, only=event.only is None, message=message)  # type: ignore[arg-type]
    return event


def join(programs: Sequence[Program]) -> Program:
    """Programs of one structure as one, the rows of each after those of the one before."""
    return tuple(_joined(events) for events in zip(*programs, strict=True))


def _joined(values: tuple[Any, ...]) -> Any:
    """Columns are put one after the other, in whatever holds them; the rest is the same in all."""
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, tuple):
        parts = [_joined(parts) for parts in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first
