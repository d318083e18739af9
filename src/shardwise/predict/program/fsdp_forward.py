"""The events of a forward with `fully_shard`, as torch 2.13 issues them.

- The forward all-gathers a unit into a flat buffer, copies the parameters out, and frees the buffer
  when the next unit has been copied out. The next unit's all-gather is issued when this unit has
  been copied out (earlier with forward_prefetch). The root comes first and is kept until the end of
  the backward.
- With a split root, the embedding is a unit that is gathered for the forward only. The head is
  gathered after the last block.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.predict.program.blocks import UnitGroup, neighbour
from shardwise.predict.program.events import ROOT_UNIT, Alloc, Cost, Event, Instant
from shardwise.predict.program.expert import DividedExperts
from shardwise.predict.program.sizes import MicroBatch


class FsdpForward(DividedExperts):
    """Emits the forward: the root, the blocks, the head."""

    def begin(self, m: MicroBatch) -> Iterator[Event]:
        gathers = self.gathers(m)
        yield from self._gather(self.root, ROOT_UNIT, gathers)
        yield from self._copy_out(self.root, ROOT_UNIT, gathers)
        held = self.gathered_bytes(self.root) + self.gather_buffer_bytes(self.root)
        yield Alloc("unsharded_parameters", held * gathers)
        yield from self._embedding_forward(m)
        yield from self.exchanged(ROOT_UNIT, (self.units.lookup.forward, 1))
        if not self.waits:
            for index in range(min(1 + self.forward_prefetch, len(self.units.blocks))):
                yield from self._gather_whole(m, index)

    def _embedding_forward(self, m: MicroBatch) -> Iterator[Event]:
        """The events of the embedding, if it is its own unit: gather, look up, reshard."""
        unit, gathers = self.embedding, self._gathers_embedding(m)
        if not unit.parameters:
            return
        yield from self._gather(unit, ROOT_UNIT, gathers)
        yield from self._copy_out(unit, ROOT_UNIT, gathers)
        yield Alloc(
            "unsharded_parameters",
            (self.gathered_bytes(unit) + self.gather_buffer_bytes(unit)) * gathers,
        )
        yield Instant((Alloc("activations", self.s.boundary),))
        yield Alloc("unsharded_parameters", -self.gather_buffer_bytes(self.root) * self.gathers(m))
        yield Alloc("unsharded_parameters", -self.gathered_bytes(unit) * self.c.reshard_forward)

    def block_forward(self, m: MicroBatch, group: UnitGroup) -> Iterator[Event]:
        unit, index, c = group.unit.groups[0], group.place, self.c
        gathers, reshards = self.gathers(m), c.reshard_forward
        divided = unit is not group.unit
        if self.waits and not (self.forward_prefetch and index):
            yield from self._gather(unit, index, gathers)
        yield from self._copy_out(unit, index, gathers)
        ahead = tuple(self._gathers_ahead(m, index))
        if self.waits or not divided:
            yield from ahead
            ahead = ()
        yield Alloc(
            "unsharded_parameters",
            (self.gathered_bytes(unit) + self.gather_buffer_bytes(unit)) * gathers,
        )
        # Copied out while the previous unit's buffer is still allocated. Parameters that are not
        # sharded along their first dimension are copied twice.
        again = Alloc("unsharded_parameters", self.s.rearranged(unit) * c.param_bytes * gathers)
        yield Instant((again, Alloc("activations", self.s.boundary)))
        yield self._buffer_freed(m, index)
        if divided:
            yield from self._forward_in_parts(m, group, ahead)
        else:
            once = ("forward", id(group))
            yield from self.emit_once(once, lambda: self._forward_of_blocks(group))
        left = self.smaller_shard(unit) if self.integer else 0.0
        yield Alloc("unsharded_parameters", (left - self.gathered_bytes(unit)) * reshards)

    def _gathers_ahead(self, m: MicroBatch, index: int) -> Iterator[Event]:
        """The all-gather of what follows unit `index`, which runs during its forward.

        Where hooks wait, a unit gathers what is in its reach before its own forward.
        """
        if self.waits:
            if self.forward_prefetch and index == 0:
                yield from self._gather_experts_ahead(m, index)
                for following in range(1, self.forward_prefetch):
                    yield from self._gather_whole(m, following)
            if self.forward_prefetch:
                yield from self._gather_whole(m, index + self.forward_prefetch)
            return
        reach = index + 1 + self.forward_prefetch
        yield from self._gather_whole(m, reach)
        if index == len(self.units.blocks) - 1:
            yield from self._gather(self.head, ROOT_UNIT, self.gathers(m))

    def _gather_whole(self, m: MicroBatch, index: int) -> Iterator[Event]:
        """The all-gather of the unit at `index`, if there is one, and of its experts if ahead."""
        unit = neighbour(self.units, index)
        if unit is not None:
            yield from self._gather(unit, index, self.gathers(m))
            yield from self._gather_experts_ahead(m, index)

    def _forward_of_blocks(self, group: UnitGroup) -> Iterator[Event]:
        for number, block in enumerate(group.unit.blocks):
            yield from self.forward_of(block, group.recomputed > number)
        yield self.compute("forward", group.place, Cost("forward", (group.unit,)))
        yield from self.moved_activations(group)
        yield from self.exchanged_forward(group.unit, group.place)

    def _buffer_freed(self, m: MicroBatch, index: int) -> Event:
        """Free the flat buffer of the unit before `index`."""
        if index == 0 and self.embedding.parameters:
            return Alloc(
                "unsharded_parameters",
                -self.gather_buffer_bytes(self.embedding) * self._gathers_embedding(m),
            )
        if index == 0:
            return Alloc(
                "unsharded_parameters", -self.gather_buffer_bytes(self.root) * self.gathers(m)
            )
        last = self.units.blocks[index - 1].groups[-1]
        before = self.gather_buffer_bytes(last)
        return Alloc("unsharded_parameters", -before * self.gathers(m))

    def head_begins(self, m: MicroBatch) -> Iterator[Event]:
        """Gather the head's parameters, copy them out, and free the last block's buffer.

        Nothing if the head has no parameters. The all-gather is emitted here only with `waits`.
        """
        if not self.head.parameters:
            return
        gathers = self.gathers(m)
        if self.waits:
            yield from self._gather(self.head, ROOT_UNIT, gathers)
        yield from self._copy_out(self.head, ROOT_UNIT, gathers)
        held = self.gathered_bytes(self.head) + self.gather_buffer_bytes(self.head)
        yield Alloc("unsharded_parameters", held * gathers)
        yield Instant((Alloc("activations", self.s.boundary),))
        yield self._buffer_freed(m, len(self.units.blocks))

    def model_returned(self, m: MicroBatch) -> Iterator[Event]:
        if self.head.parameters:
            yield Alloc(
                "unsharded_parameters", -self.gather_buffer_bytes(self.head) * self.gathers(m)
            )
        else:
            yield self._buffer_freed(m, len(self.units.blocks))
