"""Elements and bytes of the rows that share a program."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Configurations, Floats, Ints
from shardwise.predict.program.optimizer_states import optimizer_state_bytes
from shardwise.spec.optimizer import Optimizer, state_tensors
from shardwise.spec.strategy import blocks_of_share
from shardwise.units.unit import ModelUnits, Moment, Stage, Unit

# Token ids and labels, 8 bytes each.
BATCH_BYTES_PER_TOKEN = 16.0


class MicroBatch(NamedTuple):
    """First, middle and last micro-batch of a step differ in what they find and what they leave."""

    first: bool
    # Gradients are reduced and parameters resharded, whatever the settings.
    final: bool


class Sizes:
    """What sharded and replicated placements have in common."""

    def __init__(self, units: ModelUnits, c: Configurations, optimizer: Optimizer) -> None:
        self.units, self.c, self.optimizer = units, c, optimizer
        # Of a device's own part of the sequences.
        self.tokens: Floats = c.micro_batch * (units.seq_len / units.division.context)
        self.recomputed: Ints = blocks_of_share(c.full_recompute, len(units.single_blocks)).astype(
            np.int64
        )
        # An integer reshard works only on what is sharded along its first dimension.
        along_rows = c.reshard_group > 0
        self._degrees, self._row = np.unique(2 * c.shard + along_rows, return_inverse=True)
        self._by_degree: dict[tuple[object, ...], Floats] = {}

    def elements(self, unit: Unit) -> Floats:
        """Elements of a unit, padded as FSDP2 pads for each row's degree."""
        return self._of(unit, "padded_numel")

    def gathered_bytes(self, unit: Unit) -> Floats:
        """Of a whole unit: in the compute dtype, but for what is gathered as it is stored."""
        gathered: Floats = self.elements(unit) * self.c.param_bytes
        if unit.uncast:
            elements, stored = self._of(unit, "uncast_numel"), self._of(unit, "uncast_bytes")
            gathered = gathered - elements * self.c.param_bytes + stored
        if unit.gathered_in_low_bits:
            gathered = gathered - self._of(unit, "low_bit_numel") * (self.c.param_bytes - 1)
        if not unit.quantised:
            return gathered
        elements, stored = self.packed(unit)
        return gathered - elements * self.c.param_bytes + stored

    def copied(self, block: Unit, moment: Moment) -> Floats:
        """Bytes of the copy of a quantised matrix that exists at this moment."""
        if moment.copied is None:
            return np.zeros(len(self.c))
        return self._of(block, "copied_numel", moment.copied) * moment.copied_bytes

    def packed(self, unit: Unit) -> tuple[Floats, Floats]:
        """Elements of all of them, and their bytes."""
        return self._of(unit, "packed_numel"), self._of(unit, "packed_bytes")

    def trained(self, unit: Unit) -> Floats:
        """Those of them that have gradients."""
        return self._of(unit, "padded_trained")

    def rearranged(self, unit: Unit) -> Floats:
        """Elements that are copied once more after a gather."""
        return self._of(unit, "rearranged")

    def rearranged_trained(self, unit: Unit) -> Floats:
        """Elements of gradients that are copied once more before a reduce-scatter."""
        return self._of(unit, "rearranged_trained")

    def last_rearranged(self, unit: Unit) -> Floats:
        """Elements of the last of these gradients."""
        return self._of(unit, "last_rearranged")

    def held_while_scattered(self, unit: Unit) -> Floats:
        """Elements of the gradients that the engine refers to during a reduce-scatter."""
        return self._of(unit, "held_while_scattered")

    def _of(self, unit: Unit, size: str, *of: str) -> Floats:
        """A size of a unit that depends on the degree of sharding, for each row's degree."""
        key = (unit, size, *of)
        if key not in self._by_degree:
            sizes, known = [], self.units.size_of_degree
            for degree in self._degrees.tolist():
                if (degree, *key) not in known:
                    shard, along_rows = divmod(degree, 2)
                    placed = unit.along_rows if along_rows else unit
                    known[degree, *key] = float(getattr(placed, size)(shard, *of))
                sizes.append(known[degree, *key])
            self._by_degree[key] = np.asarray(sizes)[self._row]
        return self._by_degree[key]

    @cached_property
    def all_trained(self) -> Floats:
        return self._sum("padded_trained")

    @cached_property
    def parameter_bytes(self) -> Floats:
        """All parameters as a device holds them: in the master dtype, or as they are stored."""
        stored = self._sum("stored_bytes") / self.c.shard
        return self._state(self._sum("master_numel")) + stored

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Their gradients: the same of those that are trained."""
        return self._state(self.all_trained)

    @cached_property
    def optimizer_bytes(self) -> Floats:
        """What the optimizer keeps between steps."""
        tensors = state_tensors(self.optimizer)
        if tensors is not None:
            return self.gradient_bytes * tensors
        return optimizer_state_bytes(self.units, self.c, self.optimizer)

    @cached_property
    def state_bytes(self) -> Floats:
        """Parameters, gradients and optimizer states; a host holds them of an offloaded model."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def _sum(self, size: str) -> Floats:
        total = np.zeros(len(self.c))
        for unit, times in Counter(self.units.units).items():
            total = total + times * self._of(unit, size)
        return total

    def _state(self, elements: Floats) -> Floats:
        state: Floats = elements / self.c.shard * self.c.master_bytes
        return state

    @cached_property
    def batch(self) -> Floats:
        batch: Floats = self.tokens * BATCH_BYTES_PER_TOKEN
        return batch

    @cached_property
    def chunk_tokens(self) -> Floats:
        """Tokens of the largest chunk of a chunked loss."""
        return np.ceil(self.tokens / self.c.loss_chunks)

    @cached_property
    def chunks(self) -> Ints:
        """No more chunks than tokens."""
        return np.minimum(self.c.loss_chunks, self.tokens).astype(np.int64)

    @cached_property
    def boundary(self) -> Floats:
        """The gradient that passes between blocks."""
        boundary: Floats = self.units.boundary_bytes * self.tokens
        return boundary

    @cached_property
    def looked_up(self) -> Floats:
        """What a lookup makes before a tensor group divides it along the sequence."""
        made: Floats = self.units.lookup_bytes * self.tokens
        return made

    @cached_property
    def tied(self) -> float:
        """Elements of the trained table that embedding and head share; 0 if each has its own."""
        sizes = [float(p.numel) for p in self.units.root.trained]
        return max(sizes, default=0.0) if self.units.tied else 0.0

    @cached_property
    def head_elements(self) -> float:
        """Elements of the root whose gradients the head's backward makes."""
        return max(moment.gradient_elements for moment in self.head_moments)

    @cached_property
    def head_moments(self) -> tuple[Moment, ...]:
        """The backward of head and loss; a traced root's goes on to the embedding."""
        own = self.tied + sum(p.numel for p in self.units.root.trained if p.after_blocks)
        moments = self.units.root.stage.backward
        return tuple(m for m in moments if m.gradient_elements <= own) or moments[:1]

    def kept(self, stage: Stage, recomputes: Bools | bool) -> Floats:
        """Bytes a block keeps for its backward."""
        kept = stage.kept
        other = np.where(
            self.c.selective, kept["selective"].activation_bytes, kept["none"].activation_bytes
        )
        return np.where(recomputes, kept["full"].activation_bytes, other) * self.tokens

    def forward_working(self, stage: Stage, unsaved: Moment, recomputes: Bools | bool) -> Floats:
        """What a forward that saves nothing holds at a moment; a selective one has saved no more
        than it keeps, and holds no more than one that saves all.
        """
        kept = stage.kept["selective"].activation_bytes - stage.kept["full"].activation_bytes
        most = stage.forward_peak.activation_bytes
        selective = min(unsaved.activation_bytes + kept, most)
        working = np.where(recomputes, unsaved.activation_bytes, selective)
        return working * self.tokens

    def unread(self, stage: Stage, recomputes: Bools | bool) -> Floats:
        """What selective recomputation keeps and the backward never reads."""
        selective = self.c.selective & ~np.asarray(recomputes)
        return np.where(selective, stage.kept["selective"].unread_bytes, 0.0) * self.tokens
