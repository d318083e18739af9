"""Read the time of a step from its program: a schedule of its streams, for many rows at once.

Events of a stream run in the order of issue. Each starts when its stream is free and everything it
waits for is done. The host runs ahead of the device. Compute that overlaps a collective is slowed
by a share of the overlap.

Times are kept in registers, the rows of one array: one for each stream, each mark, and each
position in a queue. A repeated body is simulated until every further repetition advances all
registers by the same time; the rest is then one multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from shardwise.predict.configurations import Bools, Configurations, Floats, Ints
from shardwise.predict.kernels import coefficients_for, hardware_of
from shardwise.predict.program.events import (
    COMMUNICATION,
    Cost,
    Program,
    Repeat,
    Run,
    Wait,
)
from shardwise.predict.program.prices import Prices
from shardwise.predict.program.step import Steps, emit_steps
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DType
from shardwise.spec.mesh import INNER_AXES, InnerAxis
from shardwise.spec.optimizer import Optimizer
from shardwise.units.unit import ModelUnits


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Times:
    """Seconds of one step by configuration: compute, copy, exposed and optimizer sum to `step_s`.

    With several networks, the first axis is the network.
    """

    step_s: Floats
    compute_s: Floats
    copy_s: Floats
    exposed_communication_s: Floats
    optimizer_s: Floats
    communication_s: Floats
    # Part of the exposed communication: collectives inside blocks, by axis.
    inside_s: dict[InnerAxis, Floats]

    def take(self, which: Ints | int) -> Times:
        """The times with these indices along the first axis: configurations, or networks."""
        plain = {f.name: getattr(self, f.name)[which] for f in fields(self)[:-1]}
        inside = {axis: seconds[which] for axis, seconds in self.inside_s.items()}
        return Times(**plain, inside_s=inside)

    def put(self, rows: Ints, part: Times) -> None:
        """Write the times of some configurations, given by their indices, into these arrays."""
        for f in fields(self)[:-1]:
            getattr(self, f.name)[..., rows] = getattr(part, f.name)
        for axis, seconds in self.inside_s.items():
            seconds[..., rows] = part.inside_s[axis]

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Times:
        """Arrays of this shape, to be written."""
        plain = {f.name: np.empty(shape) for f in fields(cls)[:-1]}
        return cls(**plain, inside_s={axis: np.empty(shape) for axis in INNER_AXES})


def predict_time(
    units: ModelUnits,
    c: Configurations,
    cluster: ClusterSpec,
    dtype: DType,
    optimizer: Optimizer,
    *,
    latency: bool = True,
) -> Times | None:
    """Seconds of one step for each configuration; None if the cluster's rates are unknown.

    Without `latency`, the network latency of messages is zero.
    """
    k, hardware = coefficients_for(cluster), hardware_of(cluster, dtype)
    if k is None or hardware is None:
        return None
    if not latency:
        k = k.without_latency
    return times_of(units, c, hardware, k, optimizer)


def times_of(
    units: ModelUnits,
    c: Configurations,
    hardware: Hardware,
    k: Coefficients,
    optimizer: Optimizer = "adamw",
) -> Times:
    """Seconds of one step for each configuration, on hardware with these coefficients."""
    return steps_on(emit_steps(units, c, optimizer, waits=hardware.on_cpu), hardware, k)


def steps_on(steps: Steps, hardware: Hardware, k: Coefficients) -> Times:
    """Seconds of one step for each configuration of already emitted programs."""
    found = Times.empty((*hardware.networks, len(steps.c)))
    for part in steps.parts:
        shape = *hardware.networks, len(part.rows)
        found.put(part.rows, schedule(part.timed, shape, Prices(part.sizes, hardware, k)))
    return found


class Priced(Protocol):
    """Gives the seconds of an event's cost, and the slowdown of overlapping compute."""

    contention: Floats | float

    def of(self, cost: Cost) -> Floats: ...


def schedule(program: Program, shape: tuple[int, ...], prices: Priced) -> Times:
    """Simulate a program's streams and return its times.

    `shape` is that of the result: (rows,), or (networks, rows).
    """
    streams = Streams(program, shape, prices)
    streams.play(program)
    spent = streams.spent
    step, optimizer = streams.free("compute").copy(), spent("optimizer")
    return Times(
        step_s=step,
        compute_s=spent("compute"),
        copy_s=spent("copy"),
        # Rounding must not make this negative.
        exposed_communication_s=np.maximum(
            step - optimizer - spent("compute") - spent("copy"), 0.0
        ),
        optimizer_s=optimizer,
        communication_s=spent("communication"),
        inside_s={axis: spent(axis) for axis in INNER_AXES},
    )


# Times this close are equal, relative to the latest register: rounding.
_ROUNDING = 1e-13
_SPENT_KINDS = ("compute", "copy", "optimizer", "communication", *INNER_AXES)


class Streams:
    """The state of a simulated step: times of streams and marks, and seconds by kind of work."""

    def __init__(self, program: Program, shape: tuple[int, ...], prices: Priced) -> None:
        self.prices, self.contention = prices, prices.contention
        names = ["compute", *_registers(program)]
        self.index = {name: number for number, name in enumerate(dict.fromkeys(names))}
        # Number of registers that are times; the rows after them are sums of seconds.
        self.times = len(self.index)
        for work in _SPENT_KINDS:
            self.index[f"spent on {work}"] = len(self.index)
        self.at: Floats = np.zeros((len(self.index), *shape))
        # A view of each register, so that a lookup needs no numpy call.
        self.rows: dict[str, Floats] = {name: self.at[row] for name, row in self.index.items()}
        self.spending = {work: self.rows[f"spent on {work}"] for work in _SPENT_KINDS[:3]}
        self.spending |= dict.fromkeys(COMMUNICATION, self.rows["spent on communication"])
        self.inside = {stream: self.rows[f"spent on {stream}"] for stream in INNER_AXES}
        self.queued: dict[str, int] = {}

    def free(self, name: str) -> Floats:
        """Seconds since the step began at which a stream is free or a mark was set (a view)."""
        return self.rows[name]

    def spent(self, work: str) -> Floats:
        """Seconds spent on a kind of work so far."""
        return self.free(f"spent on {work}").copy()

    def play(self, program: Program) -> None:
        """Simulate a program's events in order."""
        for event in program:
            kind = type(event)
            if kind is Run:
                self.run(event)  # type: ignore[arg-type]
            elif kind is Repeat:
                self._repeat(event)  # type: ignore[arg-type]
            elif kind is Wait:
                self.wait(event)  # type: ignore[arg-type]

    def wait(self, event: Wait) -> None:
        """Delay a stream until the streams and marks it waits for."""
        stream, rows = self.rows[event.stream], self.rows
        for name in event.after:
            if name in rows:
                np.maximum(stream, rows[name], out=stream)

    def run(self, event: Run) -> tuple[Floats, Floats]:
        """Simulate an event and return the seconds it takes, and its end since the step began."""
        stream = self.rows[event.stream]
        ready = self._ready(event)
        start = stream if ready is None else np.maximum(stream, ready)
        seconds = own = self.prices.of(event.cost)
        if event.beside:
            seconds = own + self.contention * self._overlap(event, start, own)
        end = start + seconds
        if event.only is not None:
            # Rows without this event pass on the time they would have waited for.
            seconds = np.where(event.only, seconds, 0.0)
            handed_on = stream if ready is None else ready
            end = np.where(event.only, end, handed_on)
            np.copyto(stream, end, where=event.only)
        else:
            stream[:] = end
        spent = self.spending[event.work]
        np.add(spent, seconds, out=spent)
        if event.stream in self.inside:
            np.add(self.inside[event.stream], seconds, out=self.inside[event.stream])
        if event.mark:
            np.copyto(self.rows[event.mark], end, where=True if event.only is None else event.only)
        if event.give:
            self._give(event.give, end)
        return seconds, end

    def _ready(self, event: Run) -> Floats | None:
        """Time at which everything an event waits for is done; None if it waits for nothing."""
        ready: Floats | None = None
        for name in event.after:
            at = self.rows.get(name)
            if at is not None:
                ready = at if ready is None else np.maximum(ready, at)
        if event.take:
            taken = self._take(event.take)
            ready = taken if ready is None else np.maximum(ready, taken)
        return ready

    def _overlap(self, event: Run, start: Floats, seconds: Floats) -> Floats:
        """Seconds of an event during which one of the streams in `event.beside` is busy."""
        # A stream that is free before the start does not overlap.
        busy = start
        for name in event.beside:
            if name in self.rows:
                busy = np.maximum(busy, self.rows[name])
        overlap: Floats = np.minimum(busy - start, seconds)
        return overlap

    def _give(self, queue: str, end: Floats) -> None:
        """Append a time to a queue."""
        number = self.queued.get(queue, 0)
        self.at[self.index[f"{queue} {number}"]] = end
        self.queued[queue] = number + 1

    def _take(self, queue: str) -> Floats:
        """Remove and return the first time of a queue."""
        number = self.queued[queue] = self.queued[queue] - 1
        first = self.index[f"{queue} 0"]
        taken: Floats = self.at[first].copy()
        # The others move up: positions of a queue are adjacent rows.
        self.at[first : first + number] = self.at[first + 1 : first + 1 + number]
        return taken

    def _repeat(self, event: Repeat) -> None:
        """Simulate repetitions of a body until they are alike, then add the rest at once."""
        left = np.broadcast_to(event.times, self.at.shape[1:]).copy()
        changed: Floats | None = None
        queued = dict(self.queued)
        while left.any():
            playing = left > 0
            before = self.at.copy()
            self.play(event.body)
            assert self.queued == queued, "a repeated body must leave its queues as it found them"
            if not playing.all():
                np.copyto(self.at, before, where=~playing)
            last, changed = changed, self.at - before
            left = left - playing
            if not left.any():
                return
            settled = (left > 0) & self._is_steady(before, changed, last)
            if settled.any():
                self.at += changed * np.where(settled, left, 0)
                left = np.where(settled, 0, left)

    def _is_steady(self, before: Floats, changed: Floats, last: Floats | None) -> Bools:
        """Mask of rows in which every further repetition will change the registers as this one did.

        Each register must meet one of three conditions. It advanced by the same time as the first.
        Or it did not change and was already earlier than the repetition's start, so it had no
        effect. Or it is the latest of all and gets further ahead by the same time as in the
        repetition before, so nothing waits for it.
        """
        now = self.at[: self.times]
        moved, changed = changed[0], changed[: self.times]
        near = _ROUNDING * now.max(axis=0)
        alike = np.abs(changed - moved) <= near
        alike |= (changed == 0) & (now <= before[0])
        if last is not None and not alike.all():
            steady = (np.abs(changed - last[: self.times]) <= near).all(axis=0)
            ahead = (changed > moved) & (now >= now.max(axis=0) - near)
            alike |= steady & ahead
        settled: Bools = alike.all(axis=0)
        return settled


def _registers(program: Program) -> Iterator[str]:
    """Names of all streams, marks and queue positions in a program, with duplicates."""
    deepest: dict[str, int] = {}
    queued: dict[str, int] = {}

    def walk(events: Program) -> Iterator[str]:
        for event in events:
            if isinstance(event, Repeat):
                yield from walk(event.body)
            elif isinstance(event, Run):
                if event.take:
                    queued[event.take] = queued.get(event.take, 0) - 1
                if event.give:
                    queued[event.give] = queued.get(event.give, 0) + 1
                    deepest[event.give] = max(deepest.get(event.give, 0), queued[event.give])
                yield event.stream
                if event.mark:
                    yield event.mark

    yield from walk(program)
    for queue, depth in deepest.items():
        yield from (f"{queue} {number}" for number in range(depth))
