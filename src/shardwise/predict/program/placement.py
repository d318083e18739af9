"""Base class of the two parameter placements, sharded (fsdp) and replicated (ddp)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar, cast

import numpy as np

from shardwise.predict.configurations import Bools, Floats, Ints
from shardwise.predict.program.blocks import UnitGroup
from shardwise.predict.program.events import (
    Alloc,
    Cost,
    Event,
    Instant,
    Message,
    Run,
    Wait,
    WorkKind,
)
from shardwise.predict.program.fused_loss import FusedLoss
from shardwise.predict.program.sizes import MicroBatch, Sizes
from shardwise.units.division import Exchange
from shardwise.units.stage import NOTHING, Moment, Stage
from shardwise.units.unit import Unit

Column = TypeVar("Column", bound="np.ndarray[Any, Any]")


class Placement:
    """Emits the events of a step that depend on where parameters live.

    All rows agree on what decides the order of events. Methods that return an iterator emit the
    events of one part of a micro-batch.
    """

    # Streams whose collectives slow a block's backward.
    beside: tuple[str, ...] = ("shard", "replicate")

    def __init__(self, sizes: Sizes, *, waits: bool = False) -> None:
        """With `waits`, hooks wait for each collective, as they do with Gloo."""
        self.s, self.c, self.units, self.waits = sizes, sizes.c, sizes.units, waits
        self.rows = len(sizes.c)
        self.every: Bools = np.ones(self.rows, dtype=np.bool_)
        self.none: Ints = np.zeros(self.rows, dtype=np.int64)
        self._emitted: dict[tuple[object, ...], Sequence[Event]] = {}
        self._columns: dict[tuple[str, bytes], Any] = {}
        self.chunked: Bools = sizes.c.loss_chunks > 1
        # Rows whose loss is computed inside the model's forward, together with its gradients.
        self.loss_inside: Bools = self.chunked | sizes.c.liger
        self.fused = FusedLoss(sizes)
        # Bytes per element of the head's gradient: summed over chunks, and of one chunk.
        self.head_gradient_bytes: Ints = sizes.c.param_bytes
        self.chunk_gradient_bytes: Ints = sizes.c.param_bytes
        # Bytes per element of a gradient that a tensor group sums.
        self.reduced_bytes: Ints = sizes.c.param_bytes

    # ---- abstract: emitted by each placement ------------------------------------------------

    def begin(self, m: MicroBatch) -> Iterator[Event]:
        """The events before the first block."""
        raise NotImplementedError

    def block_forward(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        raise NotImplementedError

    def alike_forward(self, m: MicroBatch) -> MicroBatch:
        """The first kind of micro-batch whose blocks have the same forward as this one's."""
        return MicroBatch(first=True, final=False)

    def head_begins(self, m: MicroBatch) -> Iterator[Event]:
        """The events after the last block and before the head."""
        raise NotImplementedError

    def model_returned(self, m: MicroBatch) -> Iterator[Event]:
        """The events when the model's forward returns, after the head."""
        raise NotImplementedError

    def backward_begins(self, m: MicroBatch) -> Iterator[Event]:
        raise NotImplementedError

    def head_gradients(self, m: MicroBatch, made: float) -> tuple[Alloc, ...]:
        """Memory of the head's gradients, when its backward has computed `made` elements."""
        raise NotImplementedError

    def head_done(self, m: MicroBatch) -> Iterator[Event]:
        raise NotImplementedError

    def block_backward(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        raise NotImplementedError

    def last_backward(self, m: MicroBatch) -> Iterator[Event]:
        """The events after the last block's backward: the embedding's gradient, last reductions."""
        raise NotImplementedError

    def forward_neighbours(self, index: int) -> tuple[int, ...]:
        """A key of what else decides the forward events of the unit at `index`."""
        return ()

    def backward_neighbours(self, index: int) -> tuple[object, ...]:
        """A key of what else decides the backward events of the unit at `index`."""
        return ()

    # ---- a reference model, and what Fsdp gathers for it -------------------------------------

    def reference_bytes(self) -> Floats:
        """Bytes of a frozen copy of the model on one device, as its forward leaves them."""
        return self.s.parameter_bytes

    def lend(self, unit: Unit, index: int) -> Iterator[Event]:
        """The all-gather of a unit of the reference model."""
        yield from ()

    def lent(self, unit: Unit, index: int) -> Iterator[Event]:
        """The copy of a gathered unit of the reference model out of its flat buffer."""
        yield from ()

    def lent_bytes(self, unit: Unit) -> Floats:
        """Bytes that a unit of the reference model is gathered to, with its flat buffer."""
        return np.zeros(self.rows)

    def lent_buffer(self, unit: Unit) -> Floats:
        """Bytes of the flat buffer of a unit of the reference model."""
        return np.zeros(self.rows)

    def cast_bytes(self, block: Unit) -> Floats:
        """Bytes of autocast's copy of one weight of a block, which it frees without gradients."""
        return np.zeros(self.rows)

    # ---- in common --------------------------------------------------------------------------

    def allocate_resident(self) -> Iterator[Event]:
        """Allocate what is alive during the whole step: parameters, optimizer states, the batch."""
        here = ~self.c.offload
        yield Alloc("parameters", self.s.parameter_bytes * here)
        yield Alloc("optimizer", self.s.optimizer_bytes * (here & ~self.c.offload_optimizer))
        yield Alloc("other", self.s.batch)
        if self.units.reference == "copy":
            yield Alloc("reference", self.reference_bytes() * here)
        if self.units.reserved_bytes:
            yield Alloc("generation", self.units.reserved_bytes * self.every)

    def gradients_dropped(self) -> Iterator[Event]:
        """Free the gradients after the optimizer step."""
        yield Alloc("gradients", -self.s.gradient_bytes * ~self.c.offload)

    def compute(
        self, name: str, unit: int, cost: Cost, beside: tuple[str, ...] = ("shard",)
    ) -> Run:
        return Run("compute", "compute", name, unit, cost, beside=beside)

    def copy(self, name: str, unit: int, cost: Cost, **how: object) -> Run:
        return Run("compute", "copy", name, unit, cost, **how)  # type: ignore[arg-type]

    def collective(
        self,
        stream: str,
        work: WorkKind,
        unit: int,
        cost: Cost,
        message: Message | None,
        **how: object,
    ) -> Iterator[Event]:
        yield Run(stream, work, work, unit, cost, message=message, **how)  # type: ignore[arg-type]
        if self.waits:
            yield Wait("compute", (stream,))

    def exchanged(
        self, unit: int, *passes: tuple[tuple[Exchange, ...], Ints | Bools | int]
    ) -> Iterator[Event]:
        """Collectives inside blocks, for which compute waits; each pass with how often it runs."""
        calls: dict[tuple[str, WorkKind], Ints] = {}
        sizes: dict[tuple[str, WorkKind], Floats] = {}
        for exchanges, times in passes:
            for one in exchanges:
                key = one.axis, one.op
                each = one.bytes * self.s.tokens + one.elements * self.reduced_bytes + one.fixed
                calls[key] = calls.get(key, self.none) + one.calls * times
                sizes[key] = sizes.get(key, 0.0) + each * times
        for (axis, op), often in calls.items():
            often, size = self.column(often), self.column(sizes[axis, op])  # noqa: PLW2901
            whole = np.rint(size).astype(np.int64)
            yield Run(
                axis, op, op, unit, Cost("exchange", (axis, op, often, size)),
                after=("compute",), only=mask_or_none(often > 0),
                message=Message(axis, whole, often),
            )  # fmt: skip
            yield Wait("compute", (axis,))
            if self.waits:
                cost = Cost("dispatch", (op, often, size))
                yield self.copy("dispatch", unit, cost, only=mask_or_none(often > 0))

    def exchanged_forward(self, unit: Unit, index: int) -> Iterator[Event]:
        """Collectives inside the blocks of a unit's forward."""
        yield from self.exchanged(index, *((b.stage.exchanges.forward, 1) for b in unit.blocks))

    def exchanged_backward(self, group: UnitGroup) -> Iterator[Event]:
        """Collectives inside the blocks of a unit's backward, with those recomputation repeats."""
        passes: list[tuple[tuple[Exchange, ...], Ints | Bools | int]] = []
        for number, block in enumerate(group.unit.blocks):
            again = (group.recomputed > number) | self.c.selective
            passes += [(block.stage.exchanges.backward, 1), (block.stage.exchanges.again, again)]
        yield from self.exchanged(group.place, *passes)

    def emit_once(
        self, key: tuple[object, ...], emit: Callable[[], Iterator[Event]]
    ) -> Sequence[Event]:
        """The events of `emit`, emitted once per key and reused in later micro-batches."""
        if key not in self._emitted:
            self._emitted[key] = tuple(emit())
        return self._emitted[key]

    def column(self, values: Column) -> Column:
        """The same object for all columns of equal values, so that they are priced once."""
        return cast(
            "Column", self._columns.setdefault((values.dtype.str, values.tobytes()), values)
        )

    def forward_of(self, block: Unit, again: Bools) -> Iterator[Event]:
        """Memory of a block's forward; it leaves the activations that the backward will read.

        `again` are the rows that recompute the block.
        """
        yield from self.forward_moments(block, block.stage, again)
        yield self.kept_activations(block, again)

    def kept_activations(self, block: Unit, again: Bools) -> Alloc:
        """Memory of the activations that a block's forward leaves for its backward."""
        again = again | self.c.offload_activations
        return Alloc("activations", self.s.kept_activation_bytes(block.stage, again))

    def forward_moments(self, block: Unit, stage: Stage, again: Bools) -> Iterator[Event]:
        """Memory during the forward of a block's stage, or of one of its parts."""
        saving, unsaved = stage.forward, stage.forward_unsaved or stage.forward
        # A block that recomputes, or whose saved tensors are offloaded, keeps none in its forward.
        again = again | self.c.offload_activations
        dropping = again | self.c.selective
        for one, other in zip_longest(saving, unsaved, fillvalue=NOTHING):
            working = self.s.forward_working(stage, other, again)
            working = np.where(dropping, working, one.activation_bytes * self.s.tokens)
            copies: tuple[Alloc, ...] = ()
            if block.quantised:
                copied = np.where(
                    dropping,
                    self.s.dequantised_copy_bytes(block, other),
                    self.s.dequantised_copy_bytes(block, one),
                )
                copies = (Alloc("unsharded_parameters", copied),)
            yield Instant((Alloc("activations", working), *copies))

    def moved_activations(self, group: UnitGroup) -> Iterator[Event]:
        """The copies of a unit's saved activations to or from host memory, not overlapped."""
        rows = self.c.offload_activations
        if rows.any():
            cost = Cost("saved_moved", (group.unit, group.recomputed))
            yield self.copy("offload", group.place, cost, only=mask_or_none(rows))

    def dequantised(self, block: Unit, moment: Moment) -> tuple[Alloc, ...]:
        """Memory of the dequantised copy of a quantised matrix, while the copy is used."""
        if moment.copied is None:
            return ()
        return (Alloc("unsharded_parameters", self.s.dequantised_copy_bytes(block, moment)),)


def mask_or_none(rows: Bools) -> Bools | None:
    """The mask for `Run.only`; None if it covers all rows."""
    return None if rows.all() else rows
