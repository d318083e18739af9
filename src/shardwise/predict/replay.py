"""One predicted step as a timeline: what every stream does when, and memory on the same clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardwise.predict.choreography import Ledger, MicroBatch, Step, sum_terms
from shardwise.predict.configurations import Configurations
from shardwise.predict.cost import durations, rules
from shardwise.predict.simulate import simulate
from shardwise.predict.time import coefficients_for, hardware_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import OPTIMIZER_STATES, Job
from shardwise.spec.strategy import Strategy
from shardwise.timeline.spans import Kind, Timeline, TimelineBuilder
from shardwise.units.unit import ModelUnits

_KINDS: dict[str, Kind] = {
    "compute": "compute",
    "optimizer": "compute",
    "copy": "copy",
    "all-gather": "communication",
    "reduce-scatter": "communication",
    "all-reduce": "communication",
}

Span = tuple[str, float, float, str, int]


def replay(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> Timeline | None:
    """The simulated step of a resolved strategy; None where its time cannot be known."""
    k, hardware = coefficients_for(cluster), hardware_of(cluster, strategy.param_dtype)
    if k is None or hardware is None:
        return None
    grouped = units.grouped(strategy.blocks_per_unit)
    columns = Configurations.of([strategy])
    states = OPTIMIZER_STATES[job.optimizer]
    spans: list[Span] = []
    priced = durations(grouped, columns, hardware, k, states)
    simulate(priced, rules(columns, k, hardware.gloo), lambda *span: spans.append(span))
    builder = TimelineBuilder()
    for lane in _KINDS:  # in this order from the top, whoever comes first
        builder.lane(lane)
    for lane, start, end, name, block in spans:
        unit = "root" if block < 0 else grouped.blocks[block].name + f" {block}"
        builder.add(lane, start, end, _KINDS[lane], name, None if lane == "optimizer" else unit)
    points = list(_memory(Step(grouped, columns, states), spans))
    return replace(
        builder.build(),
        memory_ns=np.asarray([round(when * 1e9) for when, _ in points], dtype=np.int64),
        memory_bytes=np.asarray([round(size) for _, size in points], dtype=np.int64),
    )


def _memory(step: Step, spans: list[Span]) -> Iterator[tuple[float, float]]:
    """The largest instant of whatever the compute stream does, from when that begins."""
    kinds = _micro_batches(step)
    m = next(kinds)
    end = 0.0
    in_backward = False
    for lane, start, stop, name, block in sorted(spans, key=lambda span: span[1]):
        end = max(end, stop)
        if lane == "optimizer":
            yield start, _largest(iter([step.optimizer_step()]))
        elif lane == "compute":
            if name == "forward" and in_backward:
                m, in_backward = next(kinds), False
            in_backward = name == "backward"
            yield start, _largest(_ledgers(step, m, name, block))
            if name == "backward" and block == 0:
                # Nothing computes any more while the root is reduced.
                yield stop, _largest(step.last_backward(m))
    yield end, float(sum_terms(step.ledger())[0])


def _micro_batches(step: Step) -> Iterator[MicroBatch]:
    """As often as each is played."""
    count = int(step.c.accumulate[0])
    kinds = step.micro_batches
    for number in range(count):
        yield kinds[0] if number == 0 else kinds[-1] if number == count - 1 else kinds[1]


def _ledgers(step: Step, m: MicroBatch, name: str, block: int) -> Iterator[Ledger]:
    if name == "forward":
        return step.end_of_forward(m) if block < 0 else step.block_forward(m, block)
    return step.loss_backward(m) if block < 0 else step.block_backward(m, block)


def _largest(ledgers: Iterator[Ledger]) -> float:
    return max(float(sum_terms(ledger)[0]) for ledger in ledgers)
