"""Read a step's program as a timeline: what each stream does when, and the memory in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import coefficients_for, hardware_of
from shardwise.predict.program.events import (
    ROOT_UNIT,
    Alloc,
    Event,
    Instant,
    Program,
    Repeat,
    Run,
    Wait,
)
from shardwise.predict.program.prices import Prices
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.program.step import step_program
from shardwise.predict.time import Streams
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.step.spans import Kind, Timeline, TimelineBuilder
from shardwise.units.unit import ModelUnits

# Lanes of the timeline from top to bottom, and the kind of span in each.
_KINDS: dict[str, Kind] = {
    "compute": "compute",
    "optimizer": "compute",
    "copy": "copy",
    "all-gather": "communication",
    "reduce-scatter": "communication",
    "all-reduce": "communication",
    "all-to-all": "communication",
}


def replay(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> Timeline | None:
    """The timeline of a simulated step of a resolved strategy; None if rates are unknown."""
    k, hardware = coefficients_for(cluster), hardware_of(cluster, strategy.param_dtype)
    if k is None or hardware is None:
        return None
    grouped = units.grouped(strategy.blocks_per_unit)
    columns = Configurations.of([strategy])
    program = step_program(grouped, columns, job.optimizer, waits=hardware.on_cpu, apart=True)
    prices = Prices(Sizes(grouped, columns, job.optimizer), hardware, k)
    streams, builder = Streams(program, (1,), prices), TimelineBuilder()
    for lane in _KINDS:
        if lane != "all-to-all" or strategy.context > 1:
            builder.lane(lane)
    # By start (seconds) of an operation on the compute stream: the most bytes alive during it.
    largest: dict[float, float] = {}
    alive = 0.0
    for event in _unrolled(program):
        if isinstance(event, Run):
            seconds, until = streams.run(event)
            start, end = float((until - seconds)[0]), float(until[0])
            if end > start:
                block = grouped.blocks[event.unit].name + f" {event.unit}"
                unit = (
                    None
                    if event.work == "optimizer"
                    else "root"
                    if event.unit == ROOT_UNIT
                    else block
                )
                builder.add(event.work, start, end, _KINDS[event.work], event.name, unit)
        elif isinstance(event, Wait):
            streams.wait(event)
        elif isinstance(event, Alloc):
            alive += float(event.bytes[0])
        elif isinstance(event, Instant):
            when = float(streams.free("compute")[0])
            size = alive + sum(float(also.bytes[0]) for also in event.also)
            largest[when] = max(size, largest.get(when, 0.0))
    largest[float(streams.at[: streams.times].max())] = alive
    return replace(
        builder.build(),
        memory_ns=np.asarray([round(when * 1e9) for when in largest], dtype=np.int64),
        memory_bytes=np.asarray([round(size) for size in largest.values()], dtype=np.int64),
    )


def _unrolled(program: Program) -> Iterator[Event]:
    """The events of a program of one row, with every Repeat expanded."""
    for event in program:
        if isinstance(event, Repeat):
            for _ in range(int(event.times[0])):
                yield from _unrolled(event.body)
        else:
            yield event
