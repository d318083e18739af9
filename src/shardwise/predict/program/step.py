"""One optimizer step as a program: its micro-batches, and then the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Configurations, Ints
from shardwise.predict.program.blocks import Group, groups
from shardwise.predict.program.ddp import Replicated
from shardwise.predict.program.events import (
    ROOT,
    Alloc,
    Event,
    Instant,
    Phase,
    Program,
    Repeat,
    Run,
    Wait,
)
from shardwise.predict.program.fsdp import Fsdp
from shardwise.predict.program.head import head_backward, head_forward
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.prices import NoPrices
from shardwise.predict.program.sizes import MicroBatch, Sizes
from shardwise.units.unit import ModelUnits

FIRST, MIDDLE, LAST = (
    MicroBatch(first=True, final=False),
    MicroBatch(first=False, final=False),
    MicroBatch(first=False, final=True),
)
ONLY = MicroBatch(first=True, final=True)


class Shape(NamedTuple):
    """What decides the order of events; rows that agree on it share a program."""

    sharded: bool
    accumulates: bool
    # Of sharded rows.
    alone: bool = False
    prefetch: int = 0
    forward_prefetch: int = 0
    integer: bool = False
    # Of replicated rows.
    ddp: bool = False
    master_bytes: int = 0
    bucket_bytes: float = 0.0


def shapes(c: Configurations) -> dict[Shape, Ints]:
    """The rows of each shape."""
    sharded = c.sharded
    columns = [
        sharded,
        c.accumulate > 1,
        sharded & (c.shard == 1),
        np.where(sharded, c.prefetch, 0),
        np.where(sharded, c.forward_prefetch, 0),
        sharded & (c.reshard_group > 0),
        ~sharded & c.ddp,
        np.where(sharded, 0, c.master_bytes),
        np.where(sharded, 0.0, c.bucket_bytes),
    ]
    table = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
    found, which = np.unique(table, axis=0, return_inverse=True)
    return {
        Shape(
            sharded=bool(row[0]), accumulates=bool(row[1]), alone=bool(row[2]),
            prefetch=int(row[3]), forward_prefetch=int(row[4]), integer=bool(row[5]),
            ddp=bool(row[6]), master_bytes=int(row[7]), bucket_bytes=float(row[8]),
        ): np.flatnonzero(which.ravel() == number)
        for number, row in enumerate(found)
    }  # fmt: skip


MakePrices = Callable[[Sizes], NoPrices]


def step_program(
    units: ModelUnits,
    c: Configurations,
    states: int = 2,
    make_prices: MakePrices | None = None,
    *,
    apart: bool = False,
) -> Program:
    """The step of rows of one shape; with `apart` no unit and no micro-batch is joined."""
    sizes = Sizes(units, c, states)
    prices = make_prices(sizes) if make_prices else NoPrices(len(c))
    placed = Fsdp(sizes, prices) if c.sharded[0] else Replicated(sizes, prices)
    return tuple(emit_step(placed, apart=apart))


def emit_step(placed: Placement, *, apart: bool = False) -> Iterator[Event]:
    k = placed.c.accumulate
    yield from placed.resting()
    if k[0] == 1:
        yield from _micro_batch(placed, ONLY, apart)
    else:
        yield from _micro_batch(placed, FIRST, apart)
        if (k > 2).any():
            middle = tuple(_micro_batch(placed, MIDDLE, apart))
            yield from middle * int(k[0] - 2) if apart else (Repeat(middle, k - 2),)
        yield from _micro_batch(placed, LAST, apart)
    yield from _optimizer(placed)


def _micro_batch(placed: Placement, m: MicroBatch, apart: bool) -> Iterator[Event]:
    units = placed.units

    def blocks(
        emit: Callable[[MicroBatch, Group], Iterator[Event]], reverse: bool
    ) -> Iterator[Event]:
        near = placed.backward_neighbours if reverse else placed.forward_neighbours
        for group in groups(units, placed.s.recomputed, near, reverse=reverse, apart=apart):
            body = tuple(emit(m, group))
            yield from body if group.times is None else (Repeat(body, group.times),)
        if not units.blocks:
            yield Instant()

    yield from placed.begin(m)
    yield Phase("forward")
    yield from blocks(placed.block_forward, reverse=False)
    yield Phase("end of forward")
    yield from head_forward(placed, m)
    yield Phase("loss backward")
    yield from head_backward(placed, m)
    yield Phase("steady backward")
    yield from blocks(placed.block_backward, reverse=True)
    yield Phase("last backward")
    yield from placed.last_backward(m)


def _optimizer(placed: Placement) -> Iterator[Event]:
    """Fused optimizers update in place: no temporaries. Then gradients are dropped."""
    yield Phase("optimizer step")
    yield Alloc("other", -placed.s.batch)
    yield Instant()
    yield Wait("compute", ("shard", "replicate", "scattered"))
    yield Run("compute", "optimizer", "optimizer step", ROOT, placed.p.optimizer())
    yield from placed.gradients_dropped()
