"""The events of a backward with `fully_shard`, as torch 2.13 issues them.

- The backward all-gathers the next unit during the compute of this one. A finished unit's gradients
  are copied into a reduce-scatter input, of which one is in flight. All-gathers and reduce-scatters
  share one communicator and run in the order they were issued.
- Hybrid sharding all-reduces the reduce-scattered gradients on a separate stream.
- The root's gradients (head first, embedding last) are reduced when everything else is done.
- With a split root, the head is kept until its backward; its gradients are reduced at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.predict.program.blocks import UnitGroup
from shardwise.predict.program.events import ROOT_UNIT, Alloc, Cost, Event, Instant
from shardwise.predict.program.expert import DividedExperts
from shardwise.predict.program.sizes import MicroBatch


class FsdpBackward(DividedExperts):
    """Emits the backward: the head, the blocks, the root; gradients are reduced on the way."""

    def backward_begins(self, m: MicroBatch) -> Iterator[Event]:
        last = len(self.units.blocks) - 1
        for step in range(min(self.prefetch, len(self.units.blocks))):
            yield from self._gather_again(last - step)

    def _gather_again(self, index: int) -> Iterator[Event]:
        """The all-gather of a unit before its backward, in rows that resharded it."""
        unit = self.units.blocks[index].groups[0]
        axis = "reshard" if self.integer else "shard"
        cost = Cost("gather_again", (unit,))
        # A prefetched unit without a backward is gathered but never used.
        queue = "gathered" if self.has_backward(index) else ""
        yield from self._all_gather(unit, index, cost, axis, self.c.reshard_forward, queue)

    def head_gradients(self, m: MicroBatch, made: float) -> tuple[Alloc, ...]:
        unit = self.head if self.head.parameters else self.root
        # The last blocks are all-gathered again after the loss's backward.
        ahead = self._prefetched_buffers(len(self.units.blocks), self.prefetch) * (made > 0)
        return (
            Alloc("unsharded_gradients", self._new_gradients(m, unit, made)),
            Alloc("unsharded_parameters", ahead),
        )

    def head_done(self, m: MicroBatch) -> Iterator[Event]:
        if self.head.parameters:
            yield Alloc("unsharded_parameters", -self.gathered_bytes(self.head) * self.reshards(m))
            boundary = Alloc("activations", self.s.boundary)
            yield from self._reduction(m, self.head, ROOT_UNIT, None, boundary)
        else:
            yield Alloc("unsharded_gradients", self._head_gradients(m))
        if self._first_trained == len(self.units.blocks):
            yield Alloc("unsharded_parameters", self._unused_prefetched_buffers())

    def block_backward(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        unit, index, regathers = group.unit.groups[0], group.place, self.c.reshard_forward
        if not self.has_backward(index):
            yield from self._unit_without_backward(m, group)
            return
        boundary = Alloc("activations", self.s.boundary)
        divided = unit is not group.unit
        if self.prefetch == 0:
            yield from self._gather_again(index)
        yield from self._copy_out(unit, index, regathers)
        further: tuple[Event, ...] = ()
        if 0 < self.prefetch <= index:
            further = tuple(self._gather_again(index - self.prefetch))
        if not divided:
            yield from further

        # Copied out of its flat buffer. After an integer reshard the unit was gathered from its
        # larger shard, which is freed when all parameters are copied out.
        shard = self.smaller_shard(unit) if self.integer else np.zeros(self.rows)
        yield Alloc("unsharded_parameters", self.gathered_bytes(unit) * regathers - shard)
        again = self.s.rearranged(unit) * self.c.param_bytes
        copying = (self.gather_buffer_bytes(unit) + again) * regathers + shard
        # Of the prefetched units, only the furthest is gathered after this one is copied out.
        copying = copying + self._prefetched_buffers(index, self.prefetch - 1)
        yield Instant((Alloc("unsharded_parameters", copying), boundary))
        ahead = self._prefetched_buffers(index, self.prefetch)
        # By default a unit is gathered by what runs before it in the backward: the first experts.
        by_experts = divided and self.prefetch == 1
        begun = Alloc("unsharded_parameters", ahead)
        further = (*further, begun) if by_experts else further
        yield from () if by_experts else (begun,)
        if index == self._first_trained:
            yield Alloc("unsharded_parameters", self._unused_prefetched_buffers())
        if divided:
            yield from self._backward_in_parts(m, group, further)
        else:
            key = ("backward", id(group), m.first)
            yield from self.emit_once(key, lambda: self._backward_of_blocks(m, group))
        resharded = self.gathered_bytes(unit) * self.reshards(m)
        yield Alloc("unsharded_parameters", -resharded)
        alive: tuple[Alloc, ...] = (boundary,)
        if index == self._first_trained and not self._embedding_trained:
            # Its input needs no gradient, so it is reduced at the end of the backward.
            alive = ()
            yield Alloc("unsharded_parameters", -self._unused_prefetched_buffers() * m.final)
        before = next((one for one in group.unit.groups[1:] if one.trained), None)
        before = before or self._previous_scatter(index)
        yield from self._reduction(m, unit, index, before, *alive)
        yield Alloc("unsharded_parameters", -ahead)

    def _unit_without_backward(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        """Events of a unit without a backward: its activations are freed and it is resharded."""
        for number, block in enumerate(group.unit.blocks):
            yield Alloc(
                "activations", -self.s.kept_activation_bytes(block.stage, group.recomputed > number)
            )
        whole = self.gathered_bytes(group.unit) * ~self.c.reshard_forward * self.reshards(m)
        kept = self.smaller_shard(group.unit) if self.integer else whole
        yield Alloc("unsharded_parameters", -kept)
        yield Instant()

    def _backward_of_blocks(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        """Memory, compute and collectives inside blocks of a unit's backward."""
        made_before = 0.0
        for number in reversed(range(len(group.unit.blocks))):
            block, again = group.unit.blocks[number], group.recomputed > number
            stage = block.stage
            yield Alloc("activations", -self.s.kept_activation_bytes(stage, again))
            unread = self.s.unread_bytes(stage, again)
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
        yield from self.exchanged(ROOT_UNIT, (self.units.lookup.backward, 1))
        # A tied table has two gradients, of the embedding and of the head; autograd adds both into
        # a third tensor.
        made = self.units.embedding_gradient_elements + self.s.tied_elements
        if self.units.whole_table:
            made = self.units.whole_table + 2.0 * self.s.tied_elements
        embedding = made * c.param_bytes
        yield Instant(
            (Alloc("activations", self.s.boundary + 2.0 * self.s.embedding_output_bytes),)
        )
        incoming = self.s.embedding_output_bytes if self.units.lookup_bytes else self.s.boundary
        boundary = Alloc("activations", incoming)
        yield Instant((Alloc("unsharded_gradients", embedding), boundary))
        if not self.head.parameters:
            yield Alloc("unsharded_gradients", -self._head_gradients(m))
        yield Alloc("unsharded_parameters", -self.gathered_bytes(self.root) * self.reshards(m))
        before = self._previous_scatter(ROOT_UNIT)
        kept = self.gathered_bytes(self.embedding) * ~c.reshard_forward * self.reshards(m)
        for unit in (self.root, self.embedding):
            yield from self._reduction(m, unit, ROOT_UNIT, before)
            before = unit if unit.trained else before
        yield Alloc("unsharded_parameters", -kept)
        if before is not None:
            yield Alloc("reduce_buffers", -self._scatter_input(m, before))
        yield Alloc("reduce_buffers", -self._all_reduce_input(m, self.s.trained_shard))
        if not m.final or self._first_trained == len(self.units.blocks):
            yield Alloc("unsharded_parameters", -self._unused_prefetched_buffers())
