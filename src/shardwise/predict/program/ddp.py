"""The events of a step with unsharded parameters: one device alone, and DDP.

DDP fills buckets in the order in which the backward produces gradients, and all-reduces each bucket
as soon as it is full. Its backward ends with the last all-reduce.

Autocast copies the weights of matmuls and caches the copies until the model's forward returns.
During the forward, the copies of all blocks so far are alive, whether they recompute or not. After
the forward, only copies that autograd saved are left: those of blocks that do not recompute, and
those of the block whose backward runs, which copies its weights again if it recomputes. Copies of
frozen weights are not cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Floats, Ints
from shardwise.predict.program.blocks import UnitGroup
from shardwise.predict.program.compress import Bucket, Compression
from shardwise.predict.program.events import ROOT_UNIT, Alloc, Cost, Event, Instant, Message, Wait
from shardwise.predict.program.placement import Placement, mask_or_none
from shardwise.predict.program.sizes import MicroBatch, Sizes
from shardwise.units.unit import ModelUnits, Unit

# DDP's first bucket is small, so that it is reduced early; the others are larger. A requested
# bucket size applies to all buckets.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


class Buckets(NamedTuple):
    """The DDP buckets, by when they are full: after the head, each block unit, the end."""

    head: tuple[Bucket, ...]
    blocks: tuple[tuple[Bucket, ...], ...]
    end: tuple[Bucket, ...]

    @property
    def all(self) -> tuple[Bucket, ...]:
        return (*self.head, *chain.from_iterable(self.blocks), *self.end)

    @property
    def number(self) -> int:
        """Number of all buckets."""
        return len(self.all)


@lru_cache(maxsize=256)
def ddp_buckets(units: ModelUnits, itemsize: int, cap_bytes: float = 0.0) -> Buckets:
    """The buckets that DDP forms from a model's gradients, in the backward's order.

    `itemsize` is bytes per gradient element, `cap_bytes` the bucket size; 0 for torch's default.
    """
    first, others = (cap_bytes, cap_bytes) if cap_bytes else (FIRST_BUCKET_BYTES, BUCKET_BYTES)
    filling: list[tuple[int, int]] = []
    filled, number = 0, 0

    def walk(unit: Unit, after_blocks: bool | None = None) -> tuple[Bucket, ...]:
        nonlocal filled, number
        full = []
        for parameter in reversed(unit.trained):
            if after_blocks is not None and parameter.after_blocks != after_blocks:
                continue
            rows = parameter.shape[0] if parameter.shape else 1
            filling.append((rows, parameter.numel // max(1, rows)))
            filled += parameter.numel
            if filled * itemsize >= (others if number else first):
                full.append(Bucket(tuple(filling)))
                filling.clear()
                filled, number = 0, number + 1
        return tuple(full)

    head = walk(units.root, after_blocks=True)
    blocks = tuple(walk(unit) for unit in reversed(units.blocks))[::-1]
    end = walk(units.root, after_blocks=False)
    return Buckets(head, blocks, (*end, Bucket(tuple(filling))) if filled else end)


class Replicated(Placement):
    """Unsharded parameters on every device, with DDP or on one device.

    All rows have the same settings that decide the buckets and their messages: dtype, bucket size,
    compression, and whether DDP is used.
    """

    def __init__(self, sizes: Sizes, *, waits: bool = False) -> None:
        super().__init__(sizes, waits=waits)
        c = self.c
        self.ddp = bool(c.ddp[0])
        self.itemsize = int(c.master_bytes[0])
        self.reduced_bytes = c.master_bytes
        self.mixed = c.param_bytes != c.master_bytes
        self.narrow = int(c.param_bytes[0])
        # A chunk's gradient is computed in the compute dtype and then cast.
        self.head_gradient_bytes = c.master_bytes
        self.chunk_gradient_bytes = c.master_bytes + c.param_bytes * self.mixed
        self.buckets = ddp_buckets(self.units, self.itemsize, float(c.bucket_bytes[0]))
        self.compression = Compression(
            self.itemsize, int(c.wire_bytes[0]) or self.itemsize, int(c.powersgd_rank[0])
        )

    def forward_neighbours(self, index: int) -> tuple[int, ...]:
        return ()

    def backward_neighbours(self, index: int) -> tuple[object, ...]:
        full = self.buckets.blocks[index]
        return full if self.compression.rank else tuple(bucket.elements for bucket in full)

    def allocate_resident(self) -> Iterator[Event]:
        yield from super().allocate_resident()
        if self.ddp:
            yield Alloc("gradients", self.s.gradient_bytes)
            kept = sum(map(self.compression.kept_bytes, self.buckets.all))
            yield Alloc("reduce_buffers", np.where(self.c.replicate > 1, float(kept), 0.0))

    def gradients_dropped(self) -> Iterator[Event]:
        """Free the gradients after the optimizer step; DDP keeps its buckets."""
        if not self.ddp:
            yield from super().gradients_dropped()

    def cast_bytes(self, block: Unit) -> Floats:
        return self.autocast_copy_bytes(block.largest_numel)

    # ---- autocast's copies ----------------------------------------------------------------------

    def autocast_copy_bytes(self, elements: float | Floats) -> Floats:
        """Bytes of autocast's copies of so many weights; 0 without mixed precision."""
        return np.where(self.mixed, elements * self.c.param_bytes, 0.0)

    @property
    def _head_copies(self) -> Floats:
        """Bytes of autocast's copies of the head's weights, including a tied table."""
        read = [p for p in self.units.root.parameters if p.after_blocks]
        if self.units.tied:
            read.append(max(self.units.root.parameters, key=lambda p: p.numel))
        return self.autocast_copy_bytes(
            float(Unit(name="head", parameters=tuple(read)).wide_numel(self.narrow))
        )

    def block_copy_bytes(self, block: Unit, again: Bools) -> Floats:
        """Bytes of a block's copies alive after its forward: cached, or saved by autograd.

        `again` is true for rows whose backward copies the weights again.
        """
        saves = block.stage.kept["none"].activation_bytes > 0
        saved = block.wide_numel(self.narrow) if saves else block.trained_numel
        # As floats: integers have 32 bits in a browser, too few for the largest blocks.
        return self.autocast_copy_bytes(np.where(again, float(block.trained_numel), float(saved)))

    def _copies_in_backward(self, number: int, recomputed: Ints) -> Bools:
        """Rows in which the backward of a unit's block `number` copies its weights again."""
        return (recomputed > number) | self.c.selective

    # ---- forward --------------------------------------------------------------------------------

    def begin(self, m: MicroBatch) -> Iterator[Event]:
        yield from self.exchanged(ROOT_UNIT, (self.units.lookup.forward, 1))

    def block_forward(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        for number, block in enumerate(group.unit.blocks):
            again = self._copies_in_backward(number, group.recomputed)
            yield Alloc("unsharded_parameters", self.block_copy_bytes(block, again))
            yield from self.forward_of(block, group.recomputed > number)
        yield self.compute("forward", group.place, Cost("forward", (group.unit,)))
        yield from self.moved_activations(group)
        yield from self.exchanged_forward(group.unit, group.place)

    def head_begins(self, m: MicroBatch) -> Iterator[Event]:
        yield Alloc("unsharded_parameters", self._head_copies)

    def model_returned(self, m: MicroBatch) -> Iterator[Event]:
        """Free autocast's cache; autograd keeps the copies it has saved."""
        dropped = np.zeros(self.rows)
        for number, block in enumerate(self.units.single_blocks):
            again = self._copies_in_backward(number, self.s.recomputed)
            dropped = dropped + self.autocast_copy_bytes(float(block.trained_numel)) * again
        yield Alloc("unsharded_parameters", -dropped)

    # ---- backward -------------------------------------------------------------------------------

    def backward_begins(self, m: MicroBatch) -> Iterator[Event]:
        yield from ()

    def head_gradients(self, m: MicroBatch, made: float) -> tuple[Alloc, ...]:
        fresh = Alloc("unsharded_gradients", self._new_gradients(m, self.units.root, made))
        return (fresh, Alloc("gradients", self._new_gradient_bytes(m, made)))

    def head_done(self, m: MicroBatch) -> Iterator[Event]:
        yield Alloc("unsharded_parameters", -self._head_copies)
        yield Alloc("unsharded_gradients", self._head_gradients(m))
        yield Alloc("gradients", self._new_gradient_bytes(m, self.s.head_elements))
        yield from self.exchanged(ROOT_UNIT, (self.units.root.stage.exchanges.reduced, 1))
        yield from self._all_reduce(m, ROOT_UNIT, self.buckets.head)

    def block_backward(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        unit = group.unit
        boundary = Alloc("activations", self.s.boundary)
        yield Instant((boundary,))
        made_before = 0.0
        for number in reversed(range(len(unit.blocks))):
            block, again = unit.blocks[number], group.recomputed > number
            copies_again = self._copies_in_backward(number, group.recomputed)
            copied_again = (
                self.autocast_copy_bytes(float(block.wide_numel(self.narrow))) * copies_again
            )
            yield Alloc("activations", -self.s.kept_activation_bytes(block.stage, again))
            yield Alloc("unsharded_parameters", copied_again)
            yield from self._backward_moments(m, unit, block, again, made_before)
            saved = self.block_copy_bytes(block, copies_again) * ~copies_again
            yield Alloc("unsharded_parameters", -copied_again - saved)
            made_before += float(block.trained_numel)
        yield Alloc("gradients", self._new_gradient_bytes(m, float(unit.trained_numel)))
        yield Instant((boundary,))
        yield from self.moved_activations(group)
        cost = Cost("backward", (unit, group.recomputed))
        yield self.compute("backward", group.place, cost, self.beside)
        yield from self.exchanged_backward(group)
        yield from self.exchanged(group.place, (unit.stage.exchanges.reduced, 1))
        yield from self._all_reduce(m, group.place, self.buckets.blocks[group.place])

    def _backward_moments(
        self, m: MicroBatch, unit: Unit, block: Unit, again: Bools, made_before: float
    ) -> Iterator[Event]:
        """The moments of a block's backward; `made_before` gradient elements exist before it."""
        unread = self.s.unread_bytes(block.stage, again)
        for moment in block.stage.backward:
            made = moment.gradient_elements + made_before
            working = moment.activation_bytes * self.s.tokens + unread
            yield Instant(
                (
                    Alloc("activations", working),
                    Alloc("unsharded_gradients", self._new_gradients(m, unit, made)),
                    Alloc("gradients", self._new_gradient_bytes(m, made)),
                    *self.dequantised(block, moment),
                )
            )

    def last_backward(self, m: MicroBatch) -> Iterator[Event]:
        yield from self.exchanged(ROOT_UNIT, (self.units.lookup.backward, 1))
        table = self.s.tied_elements
        # Autocast does not apply to the embedding: its gradient, and the sum of the two gradients
        # of a tied table, have the master dtype.
        added = self.units.embedding_gradient_elements if table == 0 else 2.0 * table
        fresh = np.where(self._added_in_place(m), added, 2.0 * table) * float(self.itemsize)
        if self.units.whole_table:
            # The full table's gradient is freed before the two gradients of a tied table are added.
            fresh = fresh + (self.units.whole_table - table) * float(self.itemsize)
        yield Alloc(
            "gradients",
            self._new_gradient_bytes(m, self.units.root.trained_numel - self.s.head_elements),
        )
        yield Instant(
            (Alloc("activations", self.s.boundary + 2.0 * self.s.embedding_output_bytes),)
        )
        incoming = self.s.embedding_output_bytes if self.units.lookup_bytes else self.s.boundary
        yield Instant((Alloc("unsharded_gradients", fresh), Alloc("activations", incoming)))
        yield Alloc("unsharded_gradients", -self._head_gradients(m))
        yield from self._all_reduce(m, ROOT_UNIT, self.buckets.end)
        yield Wait("compute", ("replicate",))

    # ---- gradients ------------------------------------------------------------------------------

    def _all_reduce(self, m: MicroBatch, index: int, full: tuple[Bucket, ...]) -> Iterator[Event]:
        """One event for the all-reduces of the buckets that are `full` after unit `index`.

        The event is for the rows with several replicas that reduce gradients in this micro-batch;
        nothing if there are none, or without DDP.
        """
        across = self.c.replicate > 1
        rows = across if m.final else across & self.c.replicate_sync_every
        if not full or not self.ddp or not rows.any():
            return
        how, only = self.compression, mask_or_none(rows)
        if how.is_used:
            held = float(max(map(how.working_bytes, full)))
            yield Instant((Alloc("reduce_buffers", np.where(rows, held, 0.0)),))
            copied = sum(map(how.copied_bytes, full))
            yield self.copy("compress", index, Cost("compressed", (copied,)), only=only)
        sizes = tuple(chain.from_iterable(map(how.messages, full)))
        message = Message("replicate", np.full(self.rows, float(sum(sizes))), calls=len(sizes))
        yield from self.collective(
            "replicate",
            "all-reduce",
            index,
            Cost("buckets", (sizes,)),
            message,
            after=("compute",),
            only=only,
        )
        if how.rank and not self.waits:
            # Its hook synchronises the device after each bucket.
            yield Wait("compute", ("replicate",))

    def _new_gradient_bytes(self, m: MicroBatch, elements: float) -> Floats:
        """Bytes that `elements` new gradient elements allocate.

        0 with DDP, whose buckets always exist, and after the first micro-batch.
        """
        fresh = 0.0 if self.ddp or not m.first else elements
        return np.asarray(fresh * self.c.master_bytes, dtype=float)

    def _added_in_place(self, m: MicroBatch) -> Bools:
        """Rows in which a new gradient is added to an existing one instead of becoming `.grad`."""
        in_place: Bools = self.mixed | (self.ddp or not m.first)
        return in_place

    def _new_gradients(self, m: MicroBatch, unit: Unit, made: float) -> Floats:
        """Bytes of temporary gradients of `unit`, of which `made` elements have been computed.

        Under autocast, a matmul computes its weight's gradient in the compute dtype. The copy of
        the weight is freed, the gradient is cast, and the cast is added to the existing gradient.
        """
        cast = self.mixed & (self.ddp or not m.first)
        itemsize = np.where(cast, self.c.master_bytes, self.c.param_bytes)
        return np.where(self._added_in_place(m), min(unit.largest_gradient, made) * itemsize, 0.0)

    def _head_gradients(self, m: MicroBatch) -> Floats:
        """Bytes of a tied table's gradient from the head, held until the embedding's backward."""
        return np.where(self._added_in_place(m), self.s.tied_elements, 0.0) * self.c.master_bytes
