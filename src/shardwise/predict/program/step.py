"""One optimizer step as a program: its micro-batches, and then the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Configurations, Ints
from shardwise.predict.program.blocks import UnitGroup, groups
from shardwise.predict.program.ddp import Replicated
from shardwise.predict.program.events import (
    ROOT_UNIT,
    Alloc,
    Cost,
    Event,
    Instant,
    Phase,
    Program,
    Repeat,
    Run,
    Wait,
    without_memory_events,
)
from shardwise.predict.program.fsdp import Fsdp
from shardwise.predict.program.loss import loss_backward, loss_forward
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.reference import reference_forward
from shardwise.predict.program.sizes import MicroBatch, Sizes
from shardwise.spec.optimizer import Optimizer
from shardwise.units.unit import ModelUnits

FIRST, MIDDLE, LAST = (
    MicroBatch(first=True, final=False),
    MicroBatch(first=False, final=False),
    MicroBatch(first=False, final=True),
)
ONLY_MICRO_BATCH = MicroBatch(first=True, final=True)


def rows_by_shape(c: Configurations) -> list[Ints]:
    """Group rows by shape: arrays of row indices that agree on what decides the order of events."""
    sharded = c.sharded
    decides = [
        sharded,
        c.accumulate > 1,
        # For sharded rows only.
        sharded & c.split_root,
        sharded & (c.shard == 1),
        np.where(sharded, c.prefetch, 0),
        np.where(sharded, c.forward_prefetch, 0),
        sharded & (c.reshard_group > 0),
        # For replicated rows only: what their buckets and messages depend on.
        ~sharded & c.ddp,
        np.where(sharded, 0, c.master_bytes),
        np.where(sharded, 0.0, c.bucket_bytes),
        c.wire_bytes,
        c.powersgd_rank,
    ]
    table = np.stack([np.asarray(column, dtype=float) for column in decides], axis=1)
    found, which = np.unique(table, axis=0, return_inverse=True)
    return [np.flatnonzero(which.ravel() == number) for number in range(len(found))]


@dataclass
class ProgramPart:
    """The rows of one shape, and their program."""

    rows: Ints
    sizes: Sizes
    program: Program

    @cached_property
    def timed(self) -> Program:
        """The program without events that only memory needs."""
        return without_memory_events(self.program)


class Steps(NamedTuple):
    """The programs of rows that share units: one for each shape."""

    units: ModelUnits
    c: Configurations
    optimizer: Optimizer
    parts: tuple[ProgramPart, ...]


def emit_steps(
    units: ModelUnits, c: Configurations, optimizer: Optimizer = "adamw", *, waits: bool = False
) -> Steps:
    """Build the programs of one step, one for each shape among the configurations.

    With `waits`, hooks wait for each collective, as they do with Gloo.
    """
    parts = []
    for rows in rows_by_shape(c):
        sizes = Sizes(units, c.take(rows), optimizer)
        parts.append(ProgramPart(rows, sizes, tuple(emit_step(_placement_of(sizes, waits)))))
    return Steps(units, c, optimizer, tuple(parts))


def step_program(
    units: ModelUnits,
    c: Configurations,
    optimizer: Optimizer = "adamw",
    *,
    waits: bool = False,
    apart: bool = False,
) -> Program:
    """The program of one step of rows of one shape; with `apart` equal units are not grouped."""
    return tuple(emit_step(_placement_of(Sizes(units, c, optimizer), waits), apart=apart))


def _placement_of(sizes: Sizes, waits: bool) -> Placement:
    kind = Fsdp if sizes.c.sharded[0] else Replicated
    return kind(sizes, waits=waits)


def emit_step(placed: Placement, *, apart: bool = False) -> Iterator[Event]:
    """The events of one optimizer step; with `apart` equal units are not grouped."""
    k, blocks = placed.c.accumulate, _Blocks.of(placed, apart)
    yield from placed.allocate_resident()
    if k[0] == 1:
        yield from _micro_batch(placed, ONLY_MICRO_BATCH, blocks)
    else:
        yield from _micro_batch(placed, FIRST, blocks)
        if (k > 2).any():
            middle = tuple(_micro_batch(placed, MIDDLE, blocks))
            yield Repeat(middle, k - 2)
        yield from _micro_batch(placed, LAST, blocks)
    yield from _optimizer(placed)


class _Blocks(NamedTuple):
    """The groups of equal units in forward and in backward order, for every micro-batch."""

    forward: tuple[UnitGroup, ...]
    backward: tuple[UnitGroup, ...]

    @classmethod
    def of(cls, placed: Placement, apart: bool) -> _Blocks:
        found = placed.units, placed.s.recomputed
        return cls(
            tuple(groups(*found, placed.forward_neighbours, apart=apart)),
            tuple(groups(*found, placed.backward_neighbours, reverse=True, apart=apart)),
        )


def _micro_batch(placed: Placement, m: MicroBatch, blocks: _Blocks) -> Iterator[Event]:
    yield from placed.begin(m)
    yield Phase("forward")
    yield from _repeat_groups(placed, placed.alike_forward(m), blocks.forward, placed.block_forward)
    yield Phase("end of forward")
    yield from loss_forward(placed, m)
    yield from reference_forward(placed, m)
    yield Phase("loss backward")
    yield from loss_backward(placed, m)
    yield Phase("steady backward")
    yield from _repeat_groups(placed, m, blocks.backward, placed.block_backward)
    yield Phase("last backward")
    yield from placed.last_backward(m)


def _repeat_groups(
    placed: Placement,
    m: MicroBatch,
    found: tuple[UnitGroup, ...],
    emit: Callable[[MicroBatch, UnitGroup], Iterator[Event]],
) -> Iterator[Event]:
    """The events that `emit` gives for each group, as one Repeat if the group has `times`.

    Groups that are alike share one tuple of events. Without groups, an Instant without allocations.
    """
    for group in found:
        once = (emit.__name__, m, group.key)
        body = placed.emit_once(once, partial(emit, m, group))
        yield from body if group.times is None else (Repeat(tuple(body), group.times),)
    if not found:
        yield Instant()


def _optimizer(placed: Placement) -> Iterator[Event]:
    """The events of the optimizer step; then gradients are freed.

    Fused optimizers update in place, without temporaries.
    """
    yield Phase("optimizer step")
    yield Alloc("other", -placed.s.batch)
    yield Instant()
    yield Wait("compute", ("shard", "replicate", "scattered"))
    yield Run("compute", "optimizer", "optimizer step", ROOT_UNIT, Cost("optimizer"))
    yield from placed.gradients_dropped()
