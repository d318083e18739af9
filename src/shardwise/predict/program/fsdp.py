"""The events of `fully_shard`, as torch 2.13 issues them.

- The forward all-gathers a unit into a flat buffer, copies the parameters out, and frees the buffer
  when the next unit has been copied out. The next unit's all-gather is issued when this unit has
  been copied out (earlier with forward_prefetch). The root comes first and is kept until the end of
  the backward.
- The backward all-gathers the next unit during the compute of this one. A finished unit's gradients
  are copied into a reduce-scatter input, of which one is in flight. All-gathers and reduce-scatters
  share one communicator and run in the order they were issued.
- Hybrid sharding all-reduces the reduce-scattered gradients on a separate stream.
- The root's gradients (head first, embedding last) are reduced when everything else is done.
- With a split root, the embedding is a unit that is gathered for the forward only. The head is
  gathered after the last block and kept until its backward; its gradients are reduced at once.
- With Gloo, hooks wait for every collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from shardwise.predict.configurations import Bools, Floats
from shardwise.predict.program.blocks import Group, identity, neighbour
from shardwise.predict.program.events import NOTHING, ROOT, Alloc, Cost, Event, Instant, Message
from shardwise.predict.program.placement import Placement, only
from shardwise.predict.program.sizes import MicroBatch, Sizes
from shardwise.units.division import Exchange
from shardwise.units.unit import Unit


class Fsdp(Placement):
    """Parameters sharded over `shard` devices with `fully_shard`.

    All rows agree on what decides the order of events: prefetch, whether an integer reshard is set,
    and whether there is more than one device to shard over.
    """

    def __init__(self, sizes: Sizes, *, waits: bool = False, scatter_stream: str = "shard") -> None:
        super().__init__(sizes, waits=waits)
        c = self.c
        self.prefetch, self.forward_prefetch = int(c.prefetch[0]), int(c.forward_prefetch[0])
        self.scatter_stream = scatter_stream
        if scatter_stream != "shard":
            self.beside = ("shard", scatter_stream, "replicate")
        # One device has nothing to gather or scatter, unless its shards are offloaded to the host.
        self.alone = bool(c.shard[0] == 1)
        self.moves: Bools = c.offload if self.alone else self.every
        self.integer = bool(c.reshard_group[0] > 0)
        self._gathered: dict[int, Floats] = {}
        self.embedding, self.head, self.root = self.units.parts_of_root
        if not c.split_root[0]:
            nothing = Unit(name="nothing", parameters=())
            self.embedding, self.head, self.root = nothing, nothing, self.units.root
        # Rows that accumulate unsharded gradients across micro-batches, in the reduce dtype.
        self.sums_whole = (c.accumulate > 1) & ~c.shard_sync_every
        self.reduced_bytes = np.where(self.sums_whole, c.reduce_bytes, c.param_bytes)
        # Bytes per element of a sharded gradient between two micro-batches.
        every = c.replicate_sync_every | (c.replicate == 1)
        self.between_bytes = np.where(every, c.master_bytes, c.reduce_bytes)

    # ---- masks: which rows gather, scatter, reduce or reshard in a micro-batch ---------------

    def gathers(self, m: MicroBatch) -> Bools:
        """Rows whose forward gathers; in others, all units are still gathered."""
        return self.every if m.first else self.c.reshard_backward

    def scatters(self, m: MicroBatch) -> Bools:
        """Rows that reduce-scatter gradients in a micro-batch."""
        return self.every if m.final else self.c.shard_sync_every

    def reduces(self, m: MicroBatch) -> Bools:
        """Rows that all-reduce sharded gradients across replicas in a micro-batch."""
        across = self.c.replicate > 1
        return across if m.final else across & self.c.replicate_sync_every

    def reshards(self, m: MicroBatch) -> Bools:
        """Rows in which a unit is resharded after its backward."""
        return self.every if m.final else self.c.reshard_backward

    def forward_neighbours(self, index: int) -> tuple[int, ...]:
        """A key of the neighbours that decide the forward events of the unit at `index`.

        Units without a unit to prefetch get a key of their own: each leaves one gather fewer in the
        queue.
        """
        ahead = neighbour(self.units, index + 1 + self.forward_prefetch)
        key = identity(neighbour(self.units, index - 1), ahead)
        return key if ahead else (*key, index)

    def backward_neighbours(self, index: int) -> tuple[int, ...]:
        reach = max(1, self.prefetch)
        ahead = [neighbour(self.units, index - step) for step in range(1, reach + 1)]
        key = identity(self._scattered_before(index), *ahead)
        ends = (self.has_backward(index), index == self._first_trained)
        return (*key, *ends) if ahead[-1] else (*key, *ends, index)

    def has_backward(self, index: int) -> bool:
        """Whether the unit at `index` has a backward: it or something before it is trained."""
        return index >= self._first_trained

    @cached_property
    def _embedding_trained(self) -> bool:
        return any(not parameter.after_blocks for parameter in self.units.root.trained)

    @cached_property
    def _first_trained(self) -> int:
        """Index of the first unit with a backward; the number of units if none has one."""
        if self._embedding_trained:
            return 0
        blocks = self.units.blocks
        return next((i for i, unit in enumerate(blocks) if unit.trained), len(blocks))

    def _scattered_before(self, index: int) -> Unit | None:
        """The unit whose reduce-scatter comes before that of `index`; None if it is the first."""
        later = (*self.units.blocks[index + 1 :], self.head)
        return next((unit for unit in later if unit.trained), None)

    # ---- bytes --------------------------------------------------------------------------------

    def gathered(self, unit: Unit) -> Floats:
        """Bytes of a unit's gathered parameters."""
        if id(unit) not in self._gathered:
            self._gathered[id(unit)] = self.s.gathered_bytes(unit)
        return self._gathered[id(unit)]

    def buffer(self, unit: Unit | None) -> Floats:
        """Bytes of the flat buffer a unit is gathered into; 0 on one device or without a unit."""
        return np.zeros(self.rows) if unit is None or self.alone else self.gathered(unit)

    def smaller_shard(self, unit: Unit) -> Floats:
        """Bytes of the shard that an integer reshard keeps between forward and backward."""
        return self.gathered(unit) / self.c.reshard_group

    # ---- forward ------------------------------------------------------------------------------

    def begin(self, m: MicroBatch) -> Iterator[Event]:
        gathers = self.gathers(m)
        yield from self._gather(self.root, ROOT, gathers)
        yield from self._copy_out(self.root, ROOT, gathers)
        held = self.gathered(self.root) + self.buffer(self.root)
        yield Alloc("unsharded_parameters", held * gathers)
        yield from self._look_up(m)
        yield from self.exchanged(ROOT, (self.units.lookup.forward, 1))
        if not self.waits:
            for index in range(min(1 + self.forward_prefetch, len(self.units.blocks))):
                yield from self._gather(self.units.blocks[index], index, gathers)

    def _look_up(self, m: MicroBatch) -> Iterator[Event]:
        """The events of the embedding, if it is its own unit: gather, look up, reshard."""
        unit, gathers = self.embedding, self._looked_up(m)
        if not unit.parameters:
            return
        yield from self._gather(unit, ROOT, gathers)
        yield from self._copy_out(unit, ROOT, gathers)
        yield Alloc("unsharded_parameters", (self.gathered(unit) + self.buffer(unit)) * gathers)
        yield Instant((Alloc("activations", self.s.boundary),))
        yield Alloc("unsharded_parameters", -self.buffer(self.root) * self.gathers(m))
        yield Alloc("unsharded_parameters", -self.gathered(unit) * self.c.reshard_forward)

    def _looked_up(self, m: MicroBatch) -> Bools:
        """Rows that gather the embedding's own unit in a micro-batch."""
        return self.gathers(m) | self.c.reshard_forward

    def block_forward(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        unit, index, c = group.unit, group.place, self.c
        gathers, reshards = self.gathers(m), c.reshard_forward
        if self.waits:
            yield from self._gather(unit, index, gathers)
        yield from self._copy_out(unit, index, gathers)
        ahead = neighbour(self.units, index + 1 + self.forward_prefetch)
        if ahead is not None and not self.waits:
            yield from self._gather(ahead, index + 1 + self.forward_prefetch, gathers)
        if index == len(self.units.blocks) - 1 and not self.waits:
            yield from self._gather(self.head, ROOT, gathers)
        yield Alloc("unsharded_parameters", (self.gathered(unit) + self.buffer(unit)) * gathers)
        # Copied out while the previous unit's buffer is still allocated. Parameters that are not
        # sharded along their first dimension are copied twice.
        again = Alloc("unsharded_parameters", self.s.rearranged(unit) * c.param_bytes * gathers)
        yield Instant((again, Alloc("activations", self.s.boundary)))
        yield self._buffer_freed(m, index)
        yield from self.once(("forward", id(group)), lambda: self._forward_of_blocks(group))
        left = self.smaller_shard(unit) if self.integer else 0.0
        yield Alloc("unsharded_parameters", (left - self.gathered(unit)) * reshards)

    def _forward_of_blocks(self, group: Group) -> Iterator[Event]:
        for number, block in enumerate(group.unit.blocks):
            yield from self.forward_of(block, group.recomputed > number)
        yield self.compute("forward", group.place, Cost("forward", (group.unit,)))
        yield from self.moved_activations(group)
        yield from self.exchanged_forward(group.unit, group.place)

    def _buffer_freed(self, m: MicroBatch, index: int) -> Event:
        """Free the flat buffer of the unit before `index`."""
        if index == 0 and self.embedding.parameters:
            return Alloc("unsharded_parameters", -self.buffer(self.embedding) * self._looked_up(m))
        if index == 0:
            return Alloc("unsharded_parameters", -self.buffer(self.root) * self.gathers(m))
        before = self.buffer(neighbour(self.units, index - 1))
        return Alloc("unsharded_parameters", -before * self.gathers(m))

    def head_begins(self, m: MicroBatch) -> Iterator[Event]:
        """Gather the head's parameters, copy them out, and free the last block's buffer.

        Nothing if the head has no parameters. The all-gather is emitted here only with `waits`.
        """
        if not self.head.parameters:
            return
        gathers = self.gathers(m)
        if self.waits:
            yield from self._gather(self.head, ROOT, gathers)
        yield from self._copy_out(self.head, ROOT, gathers)
        held = self.gathered(self.head) + self.buffer(self.head)
        yield Alloc("unsharded_parameters", held * gathers)
        yield Instant((Alloc("activations", self.s.boundary),))
        yield self._buffer_freed(m, len(self.units.blocks))

    def model_returned(self, m: MicroBatch) -> Iterator[Event]:
        if self.head.parameters:
            yield Alloc("unsharded_parameters", -self.buffer(self.head) * self.gathers(m))
        else:
            yield self._buffer_freed(m, len(self.units.blocks))

    def _gather(self, unit: Unit, index: int, rows: Bools) -> Iterator[Event]:
        """The all-gather of a unit before its forward, in those of `rows` that move shards.

        Only the collective: the callers emit the memory of the gathered parameters.
        """
        yield from self._all_gather(unit, index, Cost("gather", (unit,)), "shard", rows)

    def _all_gather(
        self,
        unit: Unit,
        index: int,
        cost: Cost,
        axis: str,
        rows: Bools,
        queue: str = "gathered",
    ) -> Iterator[Event]:
        """An all-gather of a unit, in the rows that move shards; its end is put into `queue`."""
        rows = rows & self.moves
        if not rows.any() or not unit.parameters:
            return
        message = None if self.alone else Message(axis, self.gathered(unit).astype(np.int64))
        yield from self.collective(
            "shard", "all-gather", index, cost, message,
            after=("compute",), give=queue, only=only(rows),
        )  # fmt: skip

    def _copy_out(self, unit: Unit, index: int, rows: Bools) -> Iterator[Event]:
        """The copy of a gathered unit out of its flat buffer, after its all-gather."""
        if not (rows & self.moves).any() or not unit.parameters:
            return
        cost = NOTHING if self.alone else Cost("copy_out", (unit,))
        yield self.copy("copy out", index, cost, take="gathered", only=only(rows & self.moves))

    # ---- a reference model --------------------------------------------------------------------

    def reference_bytes(self) -> Floats:
        c, resident = self.c, self.s.parameter_bytes
        for unit in self.units.units:
            resident = resident + self.gathered(unit) * ~c.reshard_forward
            if self.integer and unit is not self.units.root:
                resident = resident + self.smaller_shard(unit)
        return resident

    def lend(self, unit: Unit, index: int) -> Iterator[Event]:
        blocks = self.integer and index != ROOT
        axis, cost = ("reshard", "gather_again") if blocks else ("shard", "gather")
        yield from self._all_gather(unit, index, Cost(cost, (unit,)), axis, self.c.reshard_forward)

    def lent(self, unit: Unit, index: int) -> Iterator[Event]:
        yield from self._copy_out(unit, index, self.c.reshard_forward)

    def lent_bytes(self, unit: Unit) -> Floats:
        return (self.gathered(unit) + self.buffer(unit)) * self.c.reshard_forward

    def lent_buffer(self, unit: Unit) -> Floats:
        return self.buffer(unit) * self.c.reshard_forward

    # ---- backward -----------------------------------------------------------------------------

    def backward_begins(self, m: MicroBatch) -> Iterator[Event]:
        last = len(self.units.blocks) - 1
        for step in range(min(self.prefetch, len(self.units.blocks))):
            yield from self._gather_again(last - step)

    def _gather_again(self, index: int) -> Iterator[Event]:
        """The all-gather of a unit before its backward, in rows that resharded it."""
        unit = self.units.blocks[index]
        axis = "reshard" if self.integer else "shard"
        cost = Cost("gather_again", (unit,))
        # A prefetched unit without a backward is gathered but never used.
        queue = "gathered" if self.has_backward(index) else ""
        yield from self._all_gather(unit, index, cost, axis, self.c.reshard_forward, queue)

    def head_gradients(self, m: MicroBatch, made: float) -> tuple[Alloc, ...]:
        unit = self.head if self.head.parameters else self.root
        # The last blocks are all-gathered again after the loss's backward.
        ahead = self._buffers_ahead(len(self.units.blocks), self.prefetch) * (made > 0)
        return (
            Alloc("unsharded_gradients", self._new_gradients(m, unit, made)),
            Alloc("unsharded_parameters", ahead),
        )

    def head_done(self, m: MicroBatch) -> Iterator[Event]:
        if self.head.parameters:
            yield Alloc("unsharded_parameters", -self.gathered(self.head) * self.reshards(m))
            boundary = Alloc("activations", self.s.boundary)
            yield from self._reduction(m, self.head, ROOT, None, boundary)
        else:
            yield Alloc("unsharded_gradients", self._head_gradients(m))
        if self._first_trained == len(self.units.blocks):
            yield Alloc("unsharded_parameters", self._gathered_for_nothing())

    def block_backward(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        unit, index, regathers = group.unit, group.place, self.c.reshard_forward
        if not self.has_backward(index):
            yield from self._left_alone(m, group)
            return
        boundary = Alloc("activations", self.s.boundary)
        if self.prefetch == 0:
            yield from self._gather_again(index)
        yield from self._copy_out(unit, index, regathers)
        if 0 < self.prefetch <= index:
            yield from self._gather_again(index - self.prefetch)

        # Copied out of its flat buffer. After an integer reshard the unit was gathered from its
        # larger shard, which is freed when all parameters are copied out.
        shard = self.smaller_shard(unit) if self.integer else np.zeros(self.rows)
        yield Alloc("unsharded_parameters", self.gathered(unit) * regathers - shard)
        again = self.s.rearranged(unit) * self.c.param_bytes
        copying = (self.buffer(unit) + again) * regathers + shard
        # Of the prefetched units, only the furthest is gathered after this one is copied out.
        copying = copying + self._buffers_ahead(index, self.prefetch - 1)
        yield Instant((Alloc("unsharded_parameters", copying), boundary))
        ahead = self._buffers_ahead(index, self.prefetch)
        yield Alloc("unsharded_parameters", ahead)
        if index == self._first_trained:
            yield Alloc("unsharded_parameters", self._gathered_for_nothing())
        key = ("backward", id(group), m.first)
        yield from self.once(key, lambda: self._backward_of_blocks(m, group))
        resharded = self.gathered(unit) * self.reshards(m)
        yield Alloc("unsharded_parameters", -resharded)
        alive: tuple[Alloc, ...] = (boundary,)
        if index == self._first_trained and not self._embedding_trained:
            # Its input needs no gradient, so it is reduced at the end of the backward.
            alive = ()
            yield Alloc("unsharded_parameters", -self._gathered_for_nothing() * m.final)
        yield from self._reduction(m, unit, index, self._scattered_before(index), *alive)
        yield Alloc("unsharded_parameters", -ahead)

    def _left_alone(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        """Events of a unit without a backward: its activations are freed and it is resharded."""
        for number, block in enumerate(group.unit.blocks):
            yield Alloc("activations", -self.s.kept(block.stage, group.recomputed > number))
        whole = self.gathered(group.unit) * ~self.c.reshard_forward * self.reshards(m)
        kept = self.smaller_shard(group.unit) if self.integer else whole
        yield Alloc("unsharded_parameters", -kept)
        yield Instant()

    def _buffers_ahead(self, index: int, reach: int) -> Floats:
        """Bytes of flat buffers of the `reach` units before `index`, prefetched in the backward."""
        first = max(index - max(0, reach), self._first_trained)
        return self._buffers(self.units.blocks[first:index])

    def _gathered_for_nothing(self) -> Floats:
        """Bytes of flat buffers of units that are prefetched but have no backward to use them."""
        first = self._first_trained
        return self._buffers(self.units.blocks[max(0, first - self.prefetch) : first])

    def _buffers(self, units: Sequence[Unit]) -> Floats:
        """Bytes of flat buffers of units gathered again for the backward."""
        total = np.zeros(self.rows)
        for unit in units:
            total = total + self.gathered(unit) * self.c.reshard_forward
        return total

    def _backward_of_blocks(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        """Memory, compute and collectives inside blocks of a unit's backward."""
        made_before = 0.0
        for number in reversed(range(len(group.unit.blocks))):
            block, again = group.unit.blocks[number], group.recomputed > number
            stage = block.stage
            yield Alloc("activations", -self.s.kept(stage, again))
            unread = self.s.unread(stage, again)
            for moment in stage.backward:
                made = moment.gradient_elements + made_before
                working = moment.activation_bytes * self.s.tokens + unread
                fresh = Alloc("unsharded_gradients", self._new_gradients(m, group.unit, made))
                yield Instant(
                    (Alloc("activations", working), fresh, *self.dequantised(block, moment))
                )
            made_before += float(block.trained_numel)
        yield from self.moved_activations(group)
        cost = Cost("backward", (group.unit, group.recomputed))
        yield self.compute("backward", group.place, cost, self.beside)
        yield from self.exchanged_backward(group)

    def last_backward(self, m: MicroBatch) -> Iterator[Event]:
        c = self.c
        yield from self.exchanged(ROOT, (self.units.lookup.backward, 1))
        # A tied table has two gradients, of the embedding and of the head; autograd adds both into
        # a third tensor.
        made = self.units.embedding_gradient_elements + self.s.tied
        if self.units.whole_table:
            made = self.units.whole_table + 2.0 * self.s.tied
        embedding = made * c.param_bytes
        yield Instant((Alloc("activations", self.s.boundary + 2.0 * self.s.looked_up),))
        incoming = self.s.looked_up if self.units.lookup_bytes else self.s.boundary
        boundary = Alloc("activations", incoming)
        yield Instant((Alloc("unsharded_gradients", embedding), boundary))
        if not self.head.parameters:
            yield Alloc("unsharded_gradients", -self._head_gradients(m))
        yield Alloc("unsharded_parameters", -self.gathered(self.root) * self.reshards(m))
        before = self._scattered_before(ROOT)
        kept = self.gathered(self.embedding) * ~c.reshard_forward * self.reshards(m)
        for unit in (self.root, self.embedding):
            yield from self._reduction(m, unit, ROOT, before)
            before = unit if unit.trained else before
        yield Alloc("unsharded_parameters", -kept)
        if before is not None:
            yield Alloc("reduce_buffers", -self._scatter_input(m, before))
        yield Alloc("reduce_buffers", -self._all_reduce_input(m, self.s.all_trained))
        if not m.final or self._first_trained == len(self.units.blocks):
            yield Alloc("unsharded_parameters", -self._gathered_for_nothing())

    # ---- gradients ----------------------------------------------------------------------------

    def _reduction(
        self, m: MicroBatch, unit: Unit, index: int, before: Unit | None, *alive: Alloc
    ) -> Iterator[Event]:
        """The reduction of a unit's gradients: copied into the reduce-scatter input, then reduced.

        The unit's parameters are resharded first. During the collective, FSDP still holds the
        gradient of the unit's last parameter. `before` is the unit scattered before this one, whose
        reduce-scatter input is freed. `alive` is what else is alive meanwhile.
        """
        if not unit.trained:
            return
        c, scatters = self.c, self.scatters(m)
        size = self.s.trained(unit)
        given = self._scatter_input(m, unit)
        kept = self._accumulated(m, unit)
        own = size * c.param_bytes * (~self.sums_whole | m.first)
        # Gradients that are not sharded along their first dimension are copied before that.
        own = own + self.s.last_rearranged(unit) * c.param_bytes
        # The full table's gradient, of which this device takes its part.
        own = own + self._whole_table(unit) * np.where(
            self.sums_whole, c.reduce_bytes, c.param_bytes
        )
        copying = np.where(scatters, own, kept + unit.largest_gradient * c.param_bytes)
        yield Alloc("reduce_buffers", given - (self._scatter_input(m, before) if before else 0.0))
        yield Instant((Alloc("unsharded_gradients", copying), *alive))
        yield Alloc("gradients", self._gradient_change(m, unit))
        yield Alloc("unsharded_gradients", kept)
        yield Alloc("reduce_buffers", self._all_reduce_input(m, size))
        # A new shard and the one accumulated in earlier micro-batches exist at the same time.
        added = scatters & c.shard_sync_every & (not m.first)
        beside = size / c.shard * c.reduce_bytes * added
        held = self.s.held_while_scattered(unit) * c.param_bytes * scatters
        held_on = Alloc("unsharded_gradients", held)
        yield Instant((held_on, Alloc("reduce_buffers", beside), *alive))
        yield from self._collectives(m, unit, index)

    def _collectives(self, m: MicroBatch, unit: Unit, index: int) -> Iterator[Event]:
        """The copy in, reduce-scatter and all-reduce of a unit's gradients."""
        if self.units.division.tensor > 1:
            reduced = self._reduced_inside(unit)
            yield from self.exchanged(index, (reduced, self.scatters(m)))
        scatters = self.scatters(m) & self.moves
        if scatters.any():
            copied = NOTHING if self.alone else Cost("copy_in", (unit,))
            how = {"only": only(scatters)}
            yield self.copy("copy in", index, copied, after=("scattered",), **how)
            size = (self.s.trained(unit) * self.c.reduce_bytes).astype(np.int64)
            message = None if self.alone else Message("shard", size)
            yield from self.collective(
                self.scatter_stream, "reduce-scatter", index, Cost("scatter", (unit,)), message,
                after=("compute",), mark="scattered", **how,
            )  # fmt: skip
        reduces = self.reduces(m)
        if reduces.any():
            shard = self.s.trained(unit) // self.c.shard * self.c.reduce_bytes
            yield from self.collective(
                "replicate", "all-reduce", index, Cost("all_reduce", (unit,)),
                Message("replicate", shard.astype(np.int64)),
                after=("compute", "scattered"), only=only(reduces),
            )  # fmt: skip

    def _reduced_inside(self, unit: Unit) -> tuple[Exchange, ...]:
        """Exchanges in which a tensor group sums a unit's gradients of norms before the scatter."""
        if unit is self.head or (unit is self.root and not self.head.parameters):
            return self.units.root.stage.exchanges.reduced
        return unit.stage.exchanges.reduced if unit in self.units.blocks else ()

    def _scatter_input(self, m: MicroBatch, unit: Unit) -> Floats:
        """Bytes of a unit's reduce-scatter input; 0 in rows that do not scatter."""
        return self.s.trained(unit) * self.c.reduce_bytes * self.scatters(m)

    def _accumulated(self, m: MicroBatch, unit: Unit) -> Floats:
        """Change in bytes of unsharded accumulated gradients, after this unit's reduction."""
        change = (not m.final) - (not m.first)
        elements = self.s.trained(unit) + self._beyond_own(unit)
        return elements * self.c.reduce_bytes * self.sums_whole * change

    def _whole_table(self, unit: Unit) -> int:
        """Elements of the full embedding table if this unit takes a part of its gradient; or 0."""
        holds = unit is (self.embedding if self.embedding.parameters else self.root)
        return self.units.whole_table if holds and not self.s.tied else 0

    def _beyond_own(self, unit: Unit) -> float:
        """Elements of the full embedding's gradient whose parameters other devices hold."""
        whole = self._whole_table(unit)
        return whole - self.units.embedding_gradient_elements if whole else 0.0

    def _gradient_change(self, m: MicroBatch, unit: Unit) -> Floats:
        """Change in bytes of sharded gradients, after this unit's reduction; 0 with offload."""
        c = self.c
        finished = c.master_bytes if m.final else self.between_bytes
        added = finished if m.first else finished - self.between_bytes
        only_last = c.master_bytes if m.final else np.zeros(self.rows)
        itemsize = np.where(c.shard_sync_every, added, only_last)
        return self.s.trained(unit) / c.shard * itemsize * ~c.offload

    def _all_reduce_input(self, m: MicroBatch, elements: Floats) -> Floats:
        """Bytes of all-reduce input that hybrid sharding keeps until the end of the backward.

        Usually the gradients themselves are the input, which gives 0. A separate input exists if
        the dtypes differ, or if the result is added to gradients of an earlier micro-batch.
        """
        c = self.c
        added = c.replicate_sync_every & (not m.first)
        apart = self.reduces(m) & ((c.reduce_bytes != c.master_bytes) | added)
        return np.where(apart, elements / c.shard * c.reduce_bytes, 0.0)

    def _added_in_place(self, m: MicroBatch) -> Bools:
        """Rows in which a new gradient is added in place to an accumulated unsharded one."""
        same: Bools = self.c.param_bytes == self.c.reduce_bytes
        return same & self.sums_whole & (not m.first)

    def _new_gradients(self, m: MicroBatch, unit: Unit, made: float) -> Floats:
        """Bytes of new unsharded gradients of `unit`, after `made` elements have been computed."""
        fresh = np.minimum(made, self.s.trained(unit))
        if not m.first:
            in_place = min(unit.largest_gradient, made)
            fresh = np.where(self._added_in_place(m), in_place, fresh)
        return fresh * self.c.param_bytes

    def _head_gradients(self, m: MicroBatch) -> Floats:
        """Bytes of the head's gradients, unsharded until everything else is reduced.

        Gradients that are added in place need no extra memory, unless the table is tied: then
        autograd holds the head's gradient until the embedding's is computed.
        """
        elements = np.where(self._added_in_place(m), self.s.tied, self.s.head_elements)
        return elements * self.c.param_bytes
