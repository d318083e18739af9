"""Gathers of parameter groups, and reductions of their gradients, as `fully_shard` issues them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.predict.configurations import Bools, Floats
from shardwise.predict.program.events import NO_COST, Alloc, Cost, Event, Instant, Message
from shardwise.predict.program.fsdp_rules import ShardedPlacement
from shardwise.predict.program.placement import mask_or_none
from shardwise.predict.program.sizes import MicroBatch
from shardwise.units.division import Exchange
from shardwise.units.unit import Unit


class GroupCollectives(ShardedPlacement):
    """Emits the collectives of parameter groups: all-gathers, reduce-scatters and all-reduces."""

    # ---- gathers ---------------------------------------------------------------------------------

    def _gather(self, unit: Unit, index: int, rows: Bools) -> Iterator[Event]:
        """The all-gather of what a unit needs first, before its forward.

        Only the collective, in those of `rows` that move shards: the callers emit the memory of the
        gathered parameters.
        """
        group = unit.groups[0]
        yield from self._all_gather(group, index, Cost("gather", (group,)), "shard", rows)

    def _all_gather(
        self,
        group: Unit,
        index: int,
        cost: Cost,
        axis: str,
        rows: Bools,
        queue: str = "gathered",
    ) -> Iterator[Event]:
        """An all-gather of a group, in the rows that move shards; its end is put into `queue`."""
        rows = rows & self.moves_group(group)
        if not rows.any() or not group.parameters:
            return
        message = None if self.alone else Message(axis, self.gathered_bytes(group).astype(np.int64))
        yield from self.collective(
            "shard", "all-gather", index, cost, message,
            after=("compute",), give=queue, only=mask_or_none(rows),
        )  # fmt: skip

    def _copy_out(
        self, group: Unit, index: int, rows: Bools, queue: str = "gathered"
    ) -> Iterator[Event]:
        """The copy of a gathered group out of its flat buffer, after its all-gather."""
        rows = rows & self.moves
        if not rows.any() or not group.parameters:
            return
        cost = NO_COST if self.alone else Cost("copy_out", (group,))
        # What one device holds whole is only cast.
        take = queue if (rows & self.moves_group(group)).any() else ""
        yield self.copy("copy out", index, cost, take=take, only=mask_or_none(rows))

    # ---- gradients -------------------------------------------------------------------------------

    def _reduction(
        self, m: MicroBatch, unit: Unit, index: int, before: Unit | None, *alive: Alloc
    ) -> Iterator[Event]:
        """The reduction of a group's gradients: copied into the reduce-scatter input, then reduced.

        The group's parameters are resharded first. During the collective, FSDP still holds the
        gradient of its last parameter. `before` is the group scattered before this one, whose
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
        own = own + self._full_table_elements(unit) * np.where(
            self.sums_whole, c.reduce_bytes, c.param_bytes
        )
        copying = np.where(scatters, own, kept + unit.largest_gradient * c.param_bytes)
        yield Alloc("reduce_buffers", given - (self._scatter_input(m, before) if before else 0.0))
        yield Instant((Alloc("unsharded_gradients", copying), *alive))
        yield Alloc("gradients", self._gradient_change(m, unit))
        yield Alloc("unsharded_gradients", kept)
        shard = self.s.shard_elements(unit)
        yield Alloc("reduce_buffers", self._all_reduce_input(m, shard))
        # A new shard and the one accumulated in earlier micro-batches exist at the same time.
        added = scatters & c.shard_sync_every & (not m.first)
        beside = shard * c.reduce_bytes * added
        held = self.s.held_while_scattered(unit) * c.param_bytes * scatters
        held_on = Alloc("unsharded_gradients", held)
        yield Instant((held_on, Alloc("reduce_buffers", beside), *alive))
        cast = self._cast_after_scatter(m, unit)
        if cast.any():
            yield Instant((Alloc("reduce_buffers", cast), *alive))
        yield from self._collectives(m, unit, index)

    def _cast_after_scatter(self, m: MicroBatch, unit: Unit) -> Floats:
        """Bytes beside accumulated gradients while a new shard is cast to their dtype, else 0.

        Across replicas the shard to cast is the all-reduce's input, which is counted already.
        """
        c = self.c
        casts = self.scatters(m) & (c.reduce_bytes != c.master_bytes)
        casts = casts & (c.replicate == 1) & ~c.offload
        made = c.reduce_bytes + c.master_bytes * (c.shard_sync_every & (not m.first))
        return np.where(casts, self.s.shard_elements(unit) * made, 0.0)

    def _collectives(self, m: MicroBatch, unit: Unit, index: int) -> Iterator[Event]:
        """The copy in, reduce-scatter and all-reduce of a group's gradients."""
        if self.units.division.tensor > 1:
            reduced = self._reduced_inside(unit)
            yield from self.exchanged(index, (reduced, self.scatters(m)))
        scatters = self.scatters(m) & self.moves_group(unit)
        if scatters.any():
            copied = NO_COST if self.alone else Cost("copy_in", (unit,))
            how = {"only": mask_or_none(scatters)}
            yield self.copy("copy in", index, copied, after=("scattered",), **how)
            size = (self.s.trained(unit) * self.c.reduce_bytes).astype(np.int64)
            message = None if self.alone else Message(unit.axis, size)
            yield from self.collective(
                self.scatter_stream, "reduce-scatter", index, Cost("scatter", (unit,)), message,
                after=("compute",), mark="scattered", **how,
            )  # fmt: skip
        reduces = self.reduces(m)
        if reduces.any():
            shard = self.s.trained(unit) // self.s.degree(unit) * self.c.reduce_bytes
            yield from self.collective(
                "replicate", "all-reduce", index, Cost("all_reduce", (unit,)),
                Message("replicate", shard.astype(np.int64)),
                after=("compute", "scattered"), only=mask_or_none(reduces),
            )  # fmt: skip

    def _reduced_inside(self, unit: Unit) -> tuple[Exchange, ...]:
        """Exchanges in which a tensor group sums a unit's gradients of norms before the scatter."""
        if unit is self.head or (unit is self.root and not self.head.parameters):
            return self.units.root.stage.exchanges.reduced
        return unit.stage.exchanges.reduced if unit in self.units.blocks else ()
