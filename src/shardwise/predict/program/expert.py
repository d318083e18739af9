"""The events of units whose experts are divided among devices: their twin is engine/expert.py.

- The experts of a block are an FSDP unit of their own inside it, sharded over the devices that hold
  the same experts. They are gathered when the block reaches them and resharded when they are done.
- Tokens travel to the devices that have their experts and back: two all-to-alls in the forward, two
  in the backward, and again where a block recomputes. Before them, devices exchange how many tokens
  each expert gets. The host reads these counts, and so issues no later gather until then. With
  `forward_prefetch`, experts of the units ahead are gathered with them, before it waits.
- In the backward, a unit gathers its experts while it begins, and its experts the unit before it.
  Gradients of experts are reduced when the backward of the experts is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Floats
from shardwise.predict.program.blocks import UnitGroup
from shardwise.predict.program.events import Alloc, Cost, Event, Instant
from shardwise.predict.program.group_collectives import GroupCollectives
from shardwise.predict.program.sizes import MicroBatch
from shardwise.units.division import Exchange
from shardwise.units.stage import Stage
from shardwise.units.unit import Unit

QUEUE = "experts gathered"


class _Block(NamedTuple):
    """A block of a unit: its experts as a group, and the rows that recompute everything in it."""

    block: Unit
    experts: Unit | None
    again: Bools


class DividedExperts(GroupCollectives):
    """Emits what happens inside units whose experts are divided."""

    def _blocks(self, group: UnitGroup) -> list[_Block]:
        """The blocks of a unit, in forward order."""
        experts = iter(group.unit.groups[1:])
        return [
            _Block(
                block,
                next(experts) if any(p.expert for p in block.parameters) else None,
                self.column(group.recomputed > number),
            )
            for number, block in enumerate(group.unit.blocks)
        ]

    # ---- forward ---------------------------------------------------------------------------------

    def _forward_in_parts(
        self, m: MicroBatch, group: UnitGroup, ahead: tuple[Event, ...]
    ) -> Iterator[Event]:
        """The forward of a unit part by part; `ahead` are the gathers of what follows it."""
        blocks, before = self._blocks(group), group.unit.groups[0]
        following = [*group.unit.groups[2:], None]
        if not self.forward_prefetch:
            yield from self._gather_experts(group.unit.groups[1], group.place, self.gathers(m))
        for one in blocks:
            for part in one.block.stage.parts or (one.block.stage,):
                if part.of_experts:
                    assert one.experts is not None
                    yield from self._experts_copied_out(m, group, one.experts, part, before)
                    yield from self.exchanged(group.place, (_counts(part.exchanges.forward), 1))
                    behind = following.pop(0)
                    if behind is None:
                        yield from ahead
                    elif not self.forward_prefetch:
                        yield from self._gather_experts(behind, group.place, self.gathers(m))
                    before = one.experts
                yield from self.forward_moments(one.block, part, one.again)
                yield from self.exchanged(group.place, (_rows(part.exchanges.forward), 1))
                yield self.compute("forward", group.place, Cost("part_forward", (part,)))
                if part.of_experts and one.experts is not None:
                    held = self.gathered_bytes(one.experts) * self.c.reshard_forward
                    yield Alloc("unsharded_parameters", -held)
            yield self.kept_activations(one.block, one.again)
            if one.block.quantised:
                cost = Cost("dequantised", (one.block,))
                yield self.compute("forward", group.place, cost)

    def _gather_experts(self, experts: Unit, index: int, rows: Bools) -> Iterator[Event]:
        """The all-gather of a block's experts, unless hooks wait: then it is issued when needed."""
        if not self.waits:
            yield from self._all_gather(
                experts, index, Cost("gather", (experts,)), experts.axis, rows, QUEUE
            )

    def _gather_experts_ahead(self, m: MicroBatch, index: int) -> Iterator[Event]:
        """The all-gathers of a unit's experts with `forward_prefetch`: before the host waits."""
        if not self.forward_prefetch:
            return
        for experts in self.units.blocks[index].groups[1:]:
            cost, gathers = Cost("gather", (experts,)), self.gathers(m)
            yield from self._all_gather(experts, index, cost, experts.axis, gathers, QUEUE)
            yield Alloc("unsharded_parameters", self.gather_buffer_bytes(experts) * gathers)

    def _experts_copied_out(
        self, m: MicroBatch, group: UnitGroup, experts: Unit, part: Stage, before: Unit
    ) -> Iterator[Event]:
        """Experts copied out of their flat buffer in the forward; frees the buffer of `before`."""
        gathers = self.gathers(m)
        if self.waits and not self.forward_prefetch:
            cost = Cost("gather", (experts,))
            yield from self._all_gather(experts, group.place, cost, experts.axis, gathers, QUEUE)
        yield from self._copy_out(experts, group.place, gathers, QUEUE)
        held = self.gathered_bytes(experts)
        if not self.forward_prefetch:
            held = held + self.gather_buffer_bytes(experts)
        yield Alloc("unsharded_parameters", held * gathers)
        copied = self.s.rearranged(experts) * self.c.param_bytes * gathers
        entering = Alloc("activations", part.before_bytes * self.s.tokens)
        yield Instant((Alloc("unsharded_parameters", copied), entering))
        yield Alloc("unsharded_parameters", -self.gather_buffer_bytes(before) * gathers)

    # ---- backward --------------------------------------------------------------------------------

    def _backward_in_parts(
        self, m: MicroBatch, group: UnitGroup, ahead: tuple[Event, ...]
    ) -> Iterator[Event]:
        """The backward of a unit part by part; `ahead` is the gather of the unit before it."""
        shared, made, index = group.unit.groups[0], 0.0, group.place
        waiting = [*group.unit.groups[1:]]
        # Bytes of the buffer of experts that were gathered while those of the block behind ran.
        early: Floats = np.zeros(self.rows)
        before = self._previous_scatter(index)
        regathers = self.c.reshard_forward
        yield from self._gather_experts(waiting[-1], index, regathers)
        for one in reversed(self._blocks(group)):
            parts = one.block.stage.parts or (one.block.stage,)
            yield Alloc("activations", -self.s.kept_activation_bytes(one.block.stage, one.again))
            unread = self.s.unread_bytes(one.block.stage, one.again)
            recomputes = one.again | self.c.selective
            for part in parts:
                if part.of_experts:
                    assert one.experts is not None
                    yield from self._experts_regathered(group, waiting.pop(), early)
                again = _counts(part.exchanges.again), _rows(part.exchanges.again)
                yield from self.exchanged(index, (again[0], recomputes))
                if part.of_experts:
                    following = waiting[-1] if waiting else None
                    if following is None:
                        yield from ahead
                    else:
                        yield from self._gather_experts(following, index, regathers)
                        early = self.gather_buffer_bytes(following) * regathers
                        yield Alloc("unsharded_parameters", early)
                yield from self.exchanged(index, (again[1], recomputes))
                if recomputes.any():
                    cost = Cost("part_again", (part, one.again))
                    yield self.compute("recompute", index, cost)
            if one.block.quantised:
                cost = Cost("dequantised_again", (one.block, one.again))
                yield self.compute("backward", index, cost)
            for part in reversed(parts):
                yield from self._moments_of_part(m, one, part, shared, made, unread)
                yield from self.exchanged(index, (part.exchanges.backward, 1))
                yield self.compute("backward", index, Cost("part_backward", (part,)), self.beside)
                if not part.of_experts:
                    made += max((moment.gradient_elements for moment in part.backward), default=0.0)
                    continue
                assert one.experts is not None
                resharded = self.gathered_bytes(one.experts) * self.reshards(m)
                yield Alloc("unsharded_parameters", -resharded)
                alive = (
                    Alloc("activations", part.after_bytes * self.s.tokens + unread),
                    Alloc("unsharded_gradients", self._new_gradients(m, shared, made)),
                )
                yield from self._reduction(m, one.experts, index, before, *alive)
                before = one.experts if one.experts.trained else before

    def _experts_regathered(
        self, group: UnitGroup, experts: Unit, early: Floats
    ) -> Iterator[Event]:
        """Experts copied out of their flat buffer in the backward, after which it is freed.

        `early` are the bytes of the buffer that are allocated already.
        """
        regathers = self.c.reshard_forward
        if self.waits:
            cost = Cost("gather_again", (experts,))
            yield from self._all_gather(experts, group.place, cost, experts.axis, regathers, QUEUE)
        yield from self._copy_out(experts, group.place, regathers, QUEUE)
        again = self.s.rearranged(experts) * self.c.param_bytes
        buffer = self.gather_buffer_bytes(experts) + again
        yield Alloc("unsharded_parameters", self.gathered_bytes(experts) * regathers - early)
        yield Instant((Alloc("unsharded_parameters", buffer * regathers),))

    def _moments_of_part(
        self, m: MicroBatch, one: _Block, part: Stage, shared: Unit, made: float, unread: Floats
    ) -> Iterator[Event]:
        """Memory during the backward of a part; `made` gradients of `shared` exist before it."""
        for moment in part.backward:
            working = moment.activation_bytes * self.s.tokens + unread
            fresh = made if part.of_experts else made + moment.gradient_elements
            gradients = self._new_gradients(m, shared, fresh)
            if part.of_experts and one.experts is not None:
                own = self._new_gradients(m, one.experts, moment.gradient_elements)
                gradients = gradients + own
            yield Instant(
                (
                    Alloc("activations", working),
                    Alloc("unsharded_gradients", gradients),
                    *self.dequantised(one.block, moment),
                )
            )


def _counts(exchanges: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    """The exchanges of token counts, which the host reads."""
    return tuple(one for one in exchanges if one.host)


def _rows(exchanges: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    """The exchanges of tokens."""
    return tuple(one for one in exchanges if not one.host)
