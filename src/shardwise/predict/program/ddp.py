"""The events of whole parameters on every device: one device alone, and DDP.

DDP fills buckets in the order in which the backward makes gradients and all-reduces each as soon
as it is full; its backward ends with the last of them.

Autocast copies the weights of matmuls and caches the copies until the model's forward returns, so
during it those of all blocks so far are alive, whether they recompute or not. After it only those
are left that autograd has saved: of blocks that do not recompute, and of the one whose backward
runs, which has copied its weights again if it recomputes. Copies of frozen weights are not cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Floats, Ints
from shardwise.predict.program.blocks import Group
from shardwise.predict.program.events import ROOT, Alloc, Cost, Event, Instant, Message, Wait
from shardwise.predict.program.placement import Placement, only
from shardwise.predict.program.sizes import MicroBatch, Sizes
from shardwise.units.unit import ModelUnits, Unit

# A small first bucket that leaves early, then larger ones. A size that is asked for holds for all.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


class Buckets(NamedTuple):
    """Elements of the buckets that are full after the head, after each block, and at the end."""

    head: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]

    @property
    def number(self) -> int:
        return len(self.head) + sum(len(found) for found in self.blocks) + len(self.end)


@lru_cache(maxsize=256)
def ddp_buckets(units: ModelUnits, itemsize: int, cap_bytes: float = 0.0) -> Buckets:
    """Walk the gradients in the order the backward makes them."""
    first, others = (cap_bytes, cap_bytes) if cap_bytes else (FIRST_BUCKET_BYTES, BUCKET_BYTES)
    filled, number = 0, 0

    def walk(unit: Unit, after_blocks: bool | None = None) -> tuple[int, ...]:
        nonlocal filled, number
        full = []
        for parameter in reversed(unit.trained):
            if after_blocks is not None and parameter.after_blocks != after_blocks:
                continue
            filled += parameter.numel
            if filled * itemsize >= (others if number else first):
                full.append(filled)
                filled, number = 0, number + 1
        return tuple(full)

    head = walk(units.root, after_blocks=True)
    blocks = tuple(walk(unit) for unit in reversed(units.blocks))[::-1]
    end = walk(units.root, after_blocks=False)
    return Buckets(head, blocks, (*end, filled) if filled else end)


class Replicated(Placement):
    """Rows agree on everything that shapes buckets: dtype, bucket size, whether DDP is used."""

    def __init__(self, sizes: Sizes, *, waits: bool = False) -> None:
        super().__init__(sizes, waits=waits)
        c = self.c
        self.ddp = bool(c.ddp[0])
        self.itemsize = int(c.master_bytes[0])
        self.reduced_bytes = c.master_bytes
        self.mixed = c.param_bytes != c.master_bytes
        self.narrow = int(c.param_bytes[0])
        # A chunk's gradient is made in the compute dtype and then cast.
        self.head_gradient_bytes = c.master_bytes
        self.chunk_gradient_bytes = c.master_bytes + c.param_bytes * self.mixed
        self.buckets = ddp_buckets(self.units, self.itemsize, float(c.bucket_bytes[0]))

    def forward_neighbours(self, index: int) -> tuple[int, ...]:
        return ()

    def backward_neighbours(self, index: int) -> tuple[int, ...]:
        return self.buckets.blocks[index]

    def resting(self) -> Iterator[Event]:
        yield from super().resting()
        if self.ddp:
            yield Alloc("gradients", self.s.gradient_bytes)

    def gradients_dropped(self) -> Iterator[Event]:
        """DDP keeps its buckets."""
        if not self.ddp:
            yield from super().gradients_dropped()

    # ---- autocast's copies ----------------------------------------------------------------------

    def copied(self, elements: float | Floats) -> Floats:
        return np.where(self.mixed, elements * self.c.param_bytes, 0.0)

    @property
    def _head_copies(self) -> Floats:
        """Of what a matmul of the root reads: all but tables that only the embedding uses."""
        read = [p for p in self.units.root.parameters if p.after_blocks]
        if self.units.tied:
            read.append(max(self.units.root.parameters, key=lambda p: p.numel))
        return self.copied(float(Unit(name="head", parameters=tuple(read)).wide_numel(self.narrow)))

    def copies_of(self, block: Unit, again: Bools) -> Floats:
        """What is alive of a block's copies after its forward: cached, or saved by autograd."""
        saves = block.stage.kept["none"].activation_bytes > 0
        saved = block.wide_numel(self.narrow) if saves else block.trained_numel
        # Not as integers: those of a browser have 32 bits, too few for the largest blocks.
        return self.copied(np.where(again, float(block.trained_numel), float(saved)))

    def _copies_again(self, number: int, recomputed: Ints) -> Bools:
        """Whether the backward of a unit's block has to copy its weights again."""
        return (recomputed > number) | self.c.selective

    # ---- forward --------------------------------------------------------------------------------

    def begin(self, m: MicroBatch) -> Iterator[Event]:
        yield from self.exchanged(ROOT, (self.units.lookup.forward, 1))

    def block_forward(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        for number, block in enumerate(group.unit.blocks):
            again = self._copies_again(number, group.recomputed)
            yield Alloc("unsharded_parameters", self.copies_of(block, again))
            yield from self.forward_of(block, group.recomputed > number)
        yield self.compute("forward", group.place, Cost("forward", (group.unit,)))
        yield from self.exchanged_forward(group.unit, group.place)

    def head_begins(self, m: MicroBatch) -> Iterator[Event]:
        yield Alloc("unsharded_parameters", self._head_copies)

    def model_returned(self, m: MicroBatch) -> Iterator[Event]:
        """Autocast's cache is gone; autograd keeps the copies it has saved."""
        dropped = np.zeros(self.rows)
        for number, block in enumerate(self.units.single_blocks):
            again = self._copies_again(number, self.s.recomputed)
            dropped = dropped + self.copied(float(block.trained_numel)) * again
        yield Alloc("unsharded_parameters", -dropped)

    # ---- backward -------------------------------------------------------------------------------

    def backward_begins(self, m: MicroBatch) -> Iterator[Event]:
        yield from ()

    def head_gradients(self, m: MicroBatch, made: float) -> tuple[Alloc, ...]:
        fresh = Alloc("unsharded_gradients", self._new_gradients(m, self.units.root, made))
        return (fresh, Alloc("gradients", self._made(m, made)))

    def head_done(self, m: MicroBatch) -> Iterator[Event]:
        yield Alloc("unsharded_parameters", -self._head_copies)
        yield Alloc("unsharded_gradients", self._head_gradients(m))
        yield Alloc("gradients", self._made(m, self.s.head_elements))
        yield from self.exchanged(ROOT, (self.units.root.stage.exchanges.reduced, 1))
        yield from self._all_reduce(m, ROOT, self.buckets.head)

    def block_backward(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        unit = group.unit
        boundary = Alloc("activations", self.s.boundary)
        yield Instant((boundary,))
        made_before = 0.0
        for number in reversed(range(len(unit.blocks))):
            block, again = unit.blocks[number], group.recomputed > number
            copies_again = self._copies_again(number, group.recomputed)
            copied_again = self.copied(float(block.wide_numel(self.narrow))) * copies_again
            yield Alloc("activations", -self.s.kept(block.stage, again))
            yield Alloc("unsharded_parameters", copied_again)
            yield from self._moments(m, unit, block, again, made_before)
            saved = self.copies_of(block, copies_again) * ~copies_again
            yield Alloc("unsharded_parameters", -copied_again - saved)
            made_before += float(block.trained_numel)
        yield Alloc("gradients", self._made(m, float(unit.trained_numel)))
        yield Instant((boundary,))
        cost = Cost("backward", (unit, group.recomputed))
        yield self.compute("backward", group.place, cost, self.beside)
        yield from self.exchanged_backward(group)
        yield from self.exchanged(group.place, (unit.stage.exchanges.reduced, 1))
        yield from self._all_reduce(m, group.place, self.buckets.blocks[group.place])

    def _moments(
        self, m: MicroBatch, unit: Unit, block: Unit, again: Bools, made_before: float
    ) -> Iterator[Event]:
        unread = self.s.unread(block.stage, again)
        for moment in block.stage.backward:
            made = moment.gradient_elements + made_before
            working = moment.activation_bytes * self.s.tokens + unread
            yield Instant(
                (
                    Alloc("activations", working),
                    Alloc("unsharded_gradients", self._new_gradients(m, unit, made)),
                    Alloc("gradients", self._made(m, made)),
                    *self.dequantised(block, moment),
                )
            )

    def last_backward(self, m: MicroBatch) -> Iterator[Event]:
        yield from self.exchanged(ROOT, (self.units.lookup.backward, 1))
        table = self.s.tied
        # Autocast leaves the embedding alone: its gradient, and the sum of a tied table's two, are
        # of the master dtype.
        added = self.units.embedding_gradient_elements if table == 0 else 2.0 * table
        fresh = np.where(self._added_in_place(m), added, 2.0 * table) * float(self.itemsize)
        if self.units.whole_table:
            # The gradient of the whole table is dropped before a tied one's two are added.
            fresh = fresh + (self.units.whole_table - table) * float(self.itemsize)
        yield Alloc(
            "gradients", self._made(m, self.units.root.trained_numel - self.s.head_elements)
        )
        yield Instant((Alloc("activations", self.s.boundary + 2.0 * self.s.looked_up),))
        incoming = self.s.looked_up if self.units.lookup_bytes else self.s.boundary
        yield Instant((Alloc("unsharded_gradients", fresh), Alloc("activations", incoming)))
        yield Alloc("unsharded_gradients", -self._head_gradients(m))
        yield from self._all_reduce(m, ROOT, self.buckets.end)
        yield Wait("compute", ("replicate",))

    # ---- gradients ------------------------------------------------------------------------------

    def _all_reduce(self, m: MicroBatch, index: int, full: tuple[int, ...]) -> Iterator[Event]:
        """The buckets that are full now, one after the other."""
        across = self.c.replicate > 1
        rows = across if m.final else across & self.c.replicate_sync_every
        if not full or not self.ddp or not rows.any():
            return
        sizes = tuple(elements * self.itemsize for elements in full)
        message = Message("replicate", np.full(self.rows, float(sum(sizes))), calls=len(sizes))
        yield from self.collective(
            "replicate",
            "all-reduce",
            index,
            Cost("buckets", (sizes,)),
            message,
            after=("compute",),
            only=only(rows),
        )

    def _made(self, m: MicroBatch, elements: float) -> Floats:
        """Bytes of gradients that did not exist before; DDP keeps them all at all times."""
        fresh = 0.0 if self.ddp or not m.first else elements
        return np.asarray(fresh * self.c.master_bytes, dtype=float)

    def _added_in_place(self, m: MicroBatch) -> Bools:
        """Whether a new gradient is added to one that is there, instead of taking its place."""
        in_place: Bools = self.mixed | (self.ddp or not m.first)
        return in_place

    def _new_gradients(self, m: MicroBatch, unit: Unit, made: float) -> Floats:
        """A matmul under autocast makes its weight's gradient in the compute dtype. Its copy of
        the weight is dropped, the gradient cast, and the cast one added to that which is there.
        """
        cast = self.mixed & (self.ddp or not m.first)
        itemsize = np.where(cast, self.c.master_bytes, self.c.param_bytes)
        return np.where(self._added_in_place(m), min(unit.largest_gradient, made) * itemsize, 0.0)

    def _head_gradients(self, m: MicroBatch) -> Floats:
        """Of a tied table autograd holds the head's gradient until it has the embedding's."""
        return np.where(self._added_in_place(m), self.s.tied, 0.0) * self.c.master_bytes
