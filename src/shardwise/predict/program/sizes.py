"""Elements and bytes on one device, for each configuration (row) that shares a program."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Configurations, Floats, Ints
from shardwise.predict.program.optimizer_states import optimizer_state_bytes
from shardwise.spec.optimizer import Optimizer, state_tensors
from shardwise.spec.recompute import blocks_of_share
from shardwise.units.stage import Moment, Stage
from shardwise.units.unit import ModelUnits, Unit

# Token ids and labels, 8 bytes each.
BATCH_BYTES_PER_TOKEN = 16.0


class MicroBatch(NamedTuple):
    """The position of a micro-batch in a step: first, middle, last, or the only one."""

    first: bool
    # The last: gradients are reduced and parameters resharded, whatever the settings.
    final: bool


class Sizes:
    """Elements and bytes of units and of the model, by row, for any placement of parameters."""

    def __init__(self, units: ModelUnits, c: Configurations, optimizer: Optimizer) -> None:
        self.units, self.c, self.optimizer = units, c, optimizer
        # Tokens per device and micro-batch: a device's own part of the sequences.
        self.tokens: Floats = c.micro_batch * (units.seq_len / units.division.context)
        self.recomputed: Ints = blocks_of_share(c.full_recompute, len(units.single_blocks)).astype(
            np.int64
        )
        # Degrees of sharding among the rows, by whether a group has divided experts. An integer
        # reshard requires sharding along the first dimension.
        along_rows = c.reshard_group > 0
        self._degrees = {
            of_experts: np.unique(2 * degree + along_rows, return_inverse=True)
            for of_experts, degree in ((False, c.shard), (True, c.expert_shard))
        }
        self._by_degree: dict[tuple[object, ...], Floats] = {}

    def degree(self, group: Unit) -> Ints:
        """Number of devices that shard a parameter group: each holds a different part of it."""
        return self.c.expert_shard if group.of_experts else self.c.shard

    def shard_elements(self, unit: Unit) -> Floats:
        """Trained elements of a unit that one device holds, each group over its own devices."""
        first, *rest = (self.trained(group) / self.degree(group) for group in unit.groups)
        return sum(rest, first)

    def elements(self, unit: Unit) -> Floats:
        """Elements of a unit, padded as FSDP2 pads for each row's degree."""
        return self._by_shard_degree(unit, "padded_numel")

    def gathered_bytes(self, unit: Unit) -> Floats:
        """Bytes of a gathered unit, in the compute dtype except weights gathered as stored."""
        gathered: Floats = self.elements(unit) * self.c.param_bytes
        if unit.uncast:
            elements, stored = (
                self._by_shard_degree(unit, "uncast_numel"),
                self._by_shard_degree(unit, "uncast_bytes"),
            )
            gathered = gathered - elements * self.c.param_bytes + stored
        if unit.gathered_in_low_bits:
            gathered = gathered - self._by_shard_degree(unit, "low_bit_numel") * (
                self.c.param_bytes - 1
            )
        if not unit.quantised:
            return gathered
        elements, stored = self.packed(unit)
        return gathered - elements * self.c.param_bytes + stored

    def dequantised_copy_bytes(self, block: Unit, moment: Moment) -> Floats:
        """Bytes of the dequantised copy of a matrix that is alive at a moment of a block."""
        if moment.copied is None:
            return np.zeros(len(self.c))
        return self._by_shard_degree(block, "copied_numel", moment.copied) * moment.copied_bytes

    def packed(self, unit: Unit) -> tuple[Floats, Floats]:
        """Elements of a unit's quantised weights, and their bytes as stored."""
        return self._by_shard_degree(unit, "packed_numel"), self._by_shard_degree(
            unit, "packed_bytes"
        )

    def trained(self, unit: Unit) -> Floats:
        """Elements of a unit's trained parameters, padded as FSDP2 pads."""
        return self._by_shard_degree(unit, "padded_trained")

    def rearranged(self, unit: Unit) -> Floats:
        """Elements of a unit that are copied once more after an all-gather."""
        return self._by_shard_degree(unit, "rearranged")

    def rearranged_trained(self, unit: Unit) -> Floats:
        """Elements of a unit's gradients that are copied once more before a reduce-scatter."""
        return self._by_shard_degree(unit, "rearranged_trained")

    def last_rearranged(self, unit: Unit) -> Floats:
        """Elements of the last of the gradients that `rearranged_trained` counts."""
        return self._by_shard_degree(unit, "last_rearranged")

    def held_while_scattered(self, unit: Unit) -> Floats:
        """Elements of a unit's gradients that FSDP still holds during their reduce-scatter."""
        return self._by_shard_degree(unit, "held_while_scattered")

    def _by_shard_degree(self, unit: Unit, size: str, *of: str) -> Floats:
        """The size given by a method of `Unit`, for each row's degrees: summed over its groups."""
        key = (unit, size, *of)
        if key not in self._by_degree:
            first, *rest = (self._of_group(group, size, *of) for group in unit.groups)
            self._by_degree[key] = sum(rest, first)
        return self._by_degree[key]

    def _of_group(self, group: Unit, size: str, *of: str) -> Floats:
        """The size of one parameter group, for each row's degree of sharding it."""
        degrees, row = self._degrees[group.of_experts]
        sizes, known, key = [], self.units.size_of_degree, (group, size, *of)
        for degree in degrees.tolist():
            if (degree, *key) not in known:
                shard, along_rows = divmod(degree, 2)
                placed = group.along_rows if along_rows else group
                known[degree, *key] = float(getattr(placed, size)(shard, *of))
            sizes.append(known[degree, *key])
        return np.asarray(sizes)[row]

    @cached_property
    def trained_shard(self) -> Floats:
        """Trained elements of the model that one device holds."""
        return self._held("padded_trained")

    @cached_property
    def parameter_bytes(self) -> Floats:
        """Bytes of parameters on one device: in the master dtype, or as stored."""
        stored = self._held("stored_bytes")
        return self._held("master_numel") * self.c.master_bytes + stored

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Bytes of gradients on one device, in the master dtype."""
        return self.trained_shard * self.c.master_bytes

    @cached_property
    def updated_bytes(self) -> Floats:
        """Bytes of one device's trained weights, as the optimizer updates them."""
        updated: Floats = self.trained_shard * self.c.update_bytes
        return updated

    @cached_property
    def optimizer_bytes(self) -> Floats:
        """Bytes of optimizer states on one device, or of its part in host memory."""
        tensors = state_tensors(self.optimizer)
        if tensors is not None:
            return self.updated_bytes * tensors
        return optimizer_state_bytes(self.units, self.c, self.optimizer)

    @cached_property
    def state_bytes(self) -> Floats:
        """Bytes of model states per device: parameters, gradients, optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @cached_property
    def host_state_bytes(self) -> Floats:
        """Bytes of states in host memory per device.

        With offloaded parameters all model states; with an offloaded optimizer its states, master
        weights, and the gradients that it reads.
        """
        updated = self.optimizer_bytes + 2.0 * self.updated_bytes
        both = np.where(self.c.offload_optimizer, updated, 0.0)
        return np.where(self.c.offload, self.state_bytes, both)

    @cached_property
    def host_activation_bytes(self) -> Floats:
        """Most bytes of activations in host memory per device: those of all blocks."""
        total = np.zeros(len(self.c))
        for number, block in enumerate(self.units.single_blocks):
            total = total + self.saved(block.stage, self.recomputed > number)
        return total * self.c.offload_activations

    @cached_property
    def reference_bytes(self) -> Floats:
        """Bytes of a frozen copy of the model on one device; 0 without one."""
        return self.parameter_bytes * (self.units.reference == "copy")

    def _sum(self, size: str, of_experts: bool) -> Floats:
        """A size of `Unit`, summed over all groups of the model that are sharded alike."""
        total = np.zeros(len(self.c))
        for unit, times in Counter(self.units.units).items():
            for group in unit.groups:
                if group.of_experts == of_experts:
                    total = total + times * self._of_group(group, size)
        return total

    def _held(self, size: str) -> Floats:
        """A size of `Unit` summed over the model, as one device holds it: each group's shard."""
        held: Floats = self._sum(size, False) / self.c.shard
        if self.units.division.expert > 1:
            held = held + self._sum(size, True) / self.c.expert_shard
        return held

    @cached_property
    def batch(self) -> Floats:
        """Bytes of a micro-batch's token ids and labels on one device."""
        batch: Floats = self.tokens * BATCH_BYTES_PER_TOKEN
        return batch

    @cached_property
    def chunk_tokens(self) -> Floats:
        """Tokens of the largest chunk of a chunked loss."""
        return np.ceil(self.tokens / self.c.loss_chunks)

    @cached_property
    def chunks(self) -> Ints:
        """Number of chunks of the loss; no more than tokens."""
        return np.minimum(self.c.loss_chunks, self.tokens).astype(np.int64)

    @cached_property
    def boundary(self) -> Floats:
        """Bytes of the activation, or its gradient, that passes between blocks."""
        boundary: Floats = self.units.boundary_bytes * self.tokens
        return boundary

    @cached_property
    def embedding_output_bytes(self) -> Floats:
        """Bytes of the embedding's output before a tensor group divides it along the sequence."""
        made: Floats = self.units.lookup_bytes * self.tokens
        return made

    @cached_property
    def tied_elements(self) -> float:
        """Elements of the trained table that embedding and head share; 0 if not tied."""
        sizes = [float(p.numel) for p in self.units.root.trained]
        return max(sizes, default=0.0) if self.units.tied else 0.0

    @cached_property
    def head_elements(self) -> float:
        """Gradient elements of the root that the head's backward computes."""
        return max(moment.gradient_elements for moment in self.head_moments)

    @cached_property
    def head_moments(self) -> tuple[Moment, ...]:
        """The moments of the backward of head and loss.

        The moments of a traced root also cover the embedding; those are left out.
        """
        own = self.tied_elements + sum(p.numel for p in self.units.root.trained if p.after_blocks)
        moments = self.units.root.stage.backward
        return tuple(m for m in moments if m.gradient_elements <= own) or moments[:1]

    def kept_activation_bytes(self, stage: Stage, recomputes: Bools | bool) -> Floats:
        """Bytes of activations a block keeps on the device for its backward; 0 with offload."""
        return self.saved(stage, recomputes) * ~self.c.offload_activations

    def saved(self, stage: Stage, recomputes: Bools | bool) -> Floats:
        """Bytes of activations a block saves for its backward, given which rows recompute it."""
        kept = stage.kept
        other = np.where(
            self.c.selective, kept["selective"].activation_bytes, kept["none"].activation_bytes
        )
        return np.where(recomputes, kept["full"].activation_bytes, other) * self.tokens

    def forward_working(self, stage: Stage, unsaved: Moment, recomputes: Bools | bool) -> Floats:
        """Bytes of activations alive at a moment of a forward that recomputes later.

        With full recompute nothing is saved. With selective recompute the saved tensors are added,
        up to the peak of a forward that saves everything.
        """
        kept = stage.kept["selective"].activation_bytes - stage.kept["full"].activation_bytes
        most = stage.forward_peak.activation_bytes
        selective = min(unsaved.activation_bytes + kept, most)
        working = np.where(recomputes, unsaved.activation_bytes, selective)
        return working * self.tokens

    def unread_bytes(self, stage: Stage, recomputes: Bools | bool) -> Floats:
        """Bytes that selective recomputation keeps but the backward does not read."""
        selective = self.c.selective & ~np.asarray(recomputes)
        return np.where(selective, stage.kept["selective"].unread_bytes, 0.0) * self.tokens
