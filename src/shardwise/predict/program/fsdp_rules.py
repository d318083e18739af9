"""What sharding decides in each row: which units are gathered, scattered and reduced, and bytes.

`fsdp_forward.py` and `fsdp_backward.py` emit the events that follow from this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from shardwise.predict.configurations import Bools, Floats
from shardwise.predict.program.blocks import identity, neighbour
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.sizes import MicroBatch, Sizes
from shardwise.units.unit import Unit


class ShardedPlacement(Placement):
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

    # ---- masks: which rows gather, scatter, reduce or reshard in a micro-batch -------------------

    def gathers(self, m: MicroBatch) -> Bools:
        """Rows whose forward gathers; in others, all units are still gathered."""
        return self.every if m.first else self.c.reshard_backward

    def alike_forward(self, m: MicroBatch) -> MicroBatch:
        gathers_again = bool(self.c.reshard_backward.all())
        return MicroBatch(first=m.first or gathers_again, final=False)

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

    # ---- units: which come before and after, and which have a backward ---------------------------

    def forward_neighbours(self, index: int) -> tuple[int, ...]:
        """A key of the neighbours that decide the forward events of the unit at `index`.

        Units without a unit to prefetch get a key of their own: each leaves one gather fewer in the
        queue; and so do those with fewer or more groups of experts than that unit.
        """
        ahead = neighbour(self.units, index + 1 + self.forward_prefetch)
        key = identity(neighbour(self.units, index - 1), ahead)
        alike = ahead is not None and len(ahead.groups) == len(self.units.blocks[index].groups)
        return key if alike else (*key, index)

    def backward_neighbours(self, index: int) -> tuple[int, ...]:
        reach = max(1, self.prefetch)
        # Units before the first that is trained are not gathered ahead.
        used = min(reach, max(0, index - self._first_trained))
        ahead = [neighbour(self.units, index - step) for step in range(1, reach + 1)]
        key = identity(self._previous_scatter(index), *ahead)
        ends = (self.has_backward(index), used)
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

    def _previous_scatter(self, index: int) -> Unit | None:
        """The group whose reduce-scatter comes before those of unit `index`; None for the first."""
        later = (*self.units.blocks[index + 1 :], self.head)
        return next((group for unit in later for group in unit.groups if group.trained), None)

    def moves_group(self, group: Unit) -> Bools:
        """Rows in which shards of a parameter group move: others hold it whole on one device."""
        return self.moves & (self.s.degree(group) > 1) if group.of_experts else self.moves

    # ---- bytes of parameters ---------------------------------------------------------------------

    def gathered_bytes(self, unit: Unit) -> Floats:
        """Bytes of a unit's gathered parameters."""
        if id(unit) not in self._gathered:
            self._gathered[id(unit)] = self.s.gathered_bytes(unit)
        return self._gathered[id(unit)]

    def gather_buffer_bytes(self, unit: Unit | None) -> Floats:
        """Bytes of the flat buffers of a unit's groups; 0 on one device or without a unit."""
        if unit is None or self.alone:
            return np.zeros(self.rows)
        if len(unit.groups) > 1:
            return sum(map(self.gather_buffer_bytes, unit.groups), np.zeros(self.rows))
        gathered = self.gathered_bytes(unit)
        return gathered * self.moves_group(unit) if unit.of_experts else gathered

    def smaller_shard(self, unit: Unit) -> Floats:
        """Bytes of the shard that an integer reshard keeps between forward and backward."""
        return self.gathered_bytes(unit) / self.c.reshard_group

    def _gathers_embedding(self, m: MicroBatch) -> Bools:
        """Rows that gather the embedding's own unit in a micro-batch."""
        return self.gathers(m) | self.c.reshard_forward

    def _prefetched_buffers(self, index: int, reach: int) -> Floats:
        """Bytes of flat buffers of the `reach` units before `index`, prefetched in the backward."""
        first = max(index - max(0, reach), self._first_trained)
        return self._regathered_buffers([unit.groups[0] for unit in self.units.blocks[first:index]])

    def _unused_prefetched_buffers(self) -> Floats:
        """Bytes of flat buffers of units that are prefetched but have no backward to use them."""
        first = self._first_trained
        unused = self.units.blocks[max(0, first - self.prefetch) : first]
        return self._regathered_buffers([unit.groups[0] for unit in unused])

    def _regathered_buffers(self, units: Sequence[Unit]) -> Floats:
        """Bytes of flat buffers of units gathered again for the backward."""
        total = np.zeros(self.rows)
        for unit in units:
            total = total + self.gathered_bytes(unit) * self.c.reshard_forward
        return total

    def reference_bytes(self) -> Floats:
        c, resident = self.c, self.s.parameter_bytes
        for unit in self.units.units:
            resident = resident + self.gathered_bytes(unit) * ~c.reshard_forward
            if self.integer and unit is not self.units.root:
                resident = resident + self.smaller_shard(unit)
        return resident

    def lent_bytes(self, unit: Unit) -> Floats:
        return (self.gathered_bytes(unit) + self.gather_buffer_bytes(unit)) * self.c.reshard_forward

    def lent_buffer(self, unit: Unit) -> Floats:
        return self.gather_buffer_bytes(unit) * self.c.reshard_forward

    # ---- bytes of gradients ----------------------------------------------------------------------

    def _scatter_input(self, m: MicroBatch, unit: Unit) -> Floats:
        """Bytes of a unit's reduce-scatter input; 0 in rows that do not scatter."""
        return self.s.trained(unit) * self.c.reduce_bytes * self.scatters(m)

    def _accumulated(self, m: MicroBatch, unit: Unit) -> Floats:
        """Change in bytes of unsharded accumulated gradients, after this unit's reduction."""
        change = (not m.final) - (not m.first)
        elements = self.s.trained(unit) + self._gradient_of_other_parts(unit)
        return elements * self.c.reduce_bytes * self.sums_whole * change

    def _full_table_elements(self, unit: Unit) -> int:
        """Elements of the full embedding table if this unit takes a part of its gradient; or 0."""
        holds = unit is (self.embedding if self.embedding.parameters else self.root)
        return self.units.whole_table if holds and not self.s.tied_elements else 0

    def _gradient_of_other_parts(self, unit: Unit) -> float:
        """Elements of the full embedding's gradient whose parameters other devices hold."""
        whole = self._full_table_elements(unit)
        return whole - self.units.embedding_gradient_elements if whole else 0.0

    def _gradient_change(self, m: MicroBatch, unit: Unit) -> Floats:
        """Change in bytes of sharded gradients, after this unit's reduction; 0 with offload."""
        c = self.c
        finished = c.master_bytes if m.final else self.between_bytes
        added = finished if m.first else finished - self.between_bytes
        only_last = c.master_bytes if m.final else np.zeros(self.rows)
        itemsize = np.where(c.shard_sync_every, added, only_last)
        return self.s.shard_elements(unit) * itemsize * ~c.offload

    def _all_reduce_input(self, m: MicroBatch, elements: Floats) -> Floats:
        """Bytes of all-reduce input that hybrid sharding keeps until the end of the backward.

        `elements` are those of this device's shard.
        Usually the gradients themselves are the input, which gives 0. A separate input exists if
        the dtypes differ, or if the result is added to gradients of an earlier micro-batch.
        """
        c = self.c
        added = c.replicate_sync_every & (not m.first)
        apart = self.reduces(m) & ((c.reduce_bytes != c.master_bytes) | added)
        return np.where(apart, elements * c.reduce_bytes, 0.0)

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
        elements = np.where(self._added_in_place(m), self.s.tied_elements, self.s.head_elements)
        return elements * self.c.param_bytes
