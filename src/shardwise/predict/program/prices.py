"""Seconds of the parts of a step: compute, copies, collectives and the optimizer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from shardwise.predict.compute import backward_s, forward_s, fused_s, recompute_s
from shardwise.predict.configurations import Bools, Floats, Ints
from shardwise.predict.network import AllReduce, Ring, all_reduce, all_to_all_s, ring
from shardwise.predict.program.events import Cost
from shardwise.predict.program.fused_loss import FusedLoss
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.units.stage import Stage
from shardwise.units.unit import Unit


class Prices:
    """Seconds of each cost on a cluster, by row. Public methods are the names of `Cost.piece`.

    Each cost of each distinct unit is computed once.
    """

    def __init__(self, sizes: Sizes, hardware: Hardware, k: Coefficients) -> None:
        self.s, self.h, self.k = sizes, hardware, k
        # Seconds lost per second of compute that overlaps a collective.
        self.contention: Floats | float = k.contention
        # A CPU copies at the same share of its memory bandwidth as it computes element-wise.
        factor = k.elementwise_factor if hardware.on_cpu else 1.0
        self.copy_bandwidth = hardware.memory_bandwidth / factor
        self.hook_s = k.hook_s if hardware.on_cpu else 0.0
        self._made: dict[tuple[object, ...], Floats] = {}
        self._by_cost: dict[int, Floats] = {}
        self._rings: dict[tuple[int, int, int], Ring] = {}
        self._all_reduces: dict[tuple[int, int, int], AllReduce] = {}

    def of(self, cost: Cost) -> Floats:
        """Seconds of a cost: the result of the method it names, times the coefficient `level`."""
        found = self._by_cost.get(id(cost))
        if found is None:
            key = (cost.piece, *map(id, cost.of))
            if key not in self._made:
                self._made[key] = getattr(self, cost.piece)(*cost.of)
            found = self._by_cost[id(cost)] = self._made[key] * self.k.level
        return found

    def nothing(self) -> Floats:
        return np.zeros(len(self.s.c))

    def forward(self, unit: Unit) -> Floats:
        """Seconds of a unit's forward; its blocks run one after the other."""
        seconds = sum(
            self._stage("forward", block.stage) + self._dequantised(block) for block in unit.blocks
        )
        if unit is self.s.units.root and self.s.c.cut.any():
            stage = unit.stage
            cut = fused_s(stage, stage.matmul_flops, 1.0, self.s.tokens, 0.0, self.h, self.k)
            return np.where(self.s.c.cut, cut, seconds)
        return seconds  # type: ignore[return-value]

    def _dequantised(self, block: Unit) -> Floats | float:
        """Seconds to dequantise a block's weights once; 0.0 if they are not quantised.

        They are read as stored and written in the compute dtype.
        """
        if not block.quantised:
            return 0.0
        elements, stored = self.s.packed(block)
        return (stored + elements * self.s.c.param_bytes) / self.copy_bandwidth

    def backward(self, unit: Unit, recomputed: Ints) -> Floats:
        """Seconds of a unit's backward; its first `recomputed` blocks (by row) recompute."""
        total: Floats = np.zeros(len(self.s.c))
        for number, block in enumerate(unit.blocks):
            again = np.where(self.s.c.selective, self._stage("selective", block.stage), 0.0)
            if (recomputed > number).any():
                again = np.where(recomputed > number, self._stage("full", block.stage), again)
            # Blocks that recompute dequantise once more.
            dequantised = self._dequantised(block) * (1 + (recomputed > number))
            total = total + self._stage("backward", block.stage) + again + dequantised
        return total

    def part_forward(self, part: Stage) -> Floats:
        """Seconds of the forward of a part of a block."""
        return self._stage("forward", part)

    def part_backward(self, part: Stage) -> Floats:
        """Seconds of the backward of a part of a block, without recomputation."""
        return self._stage("backward", part)

    def part_again(self, part: Stage, again: Bools) -> Floats:
        """Seconds in which a part of a block is recomputed: fully in the rows of `again`."""
        selective, full = self._stage("selective", part), self._stage("full", part)
        return np.where(again, full, np.where(self.s.c.selective, selective, 0.0))

    def dequantised(self, block: Unit) -> Floats:
        """Seconds to dequantise a block's weights once."""
        return self.nothing() + self._dequantised(block)

    def dequantised_again(self, block: Unit, again: Bools) -> Floats:
        """Seconds to dequantise a block's weights in its backward; twice in rows of `again`."""
        return self.dequantised(block) * (1 + again)

    def root_backward(self) -> Floats:
        """Seconds of the backward of the root: head and loss.

        Cut Cross-Entropy computes the logits again, and skips about as much work where gradients
        are below the precision of their dtype.
        """
        stage, whole = self.s.units.root.stage, self._stage("backward", self.s.units.root.stage)
        if not self.s.c.cut.any():
            return whole
        flops = stage.backward_matmul_flops
        cut = fused_s(stage, flops, 2.0, self.s.tokens, 0.0, self.h, self.k)
        return np.where(self.s.c.cut, cut, whole)

    def liger(self) -> Floats:
        """Seconds of forward and backward of head and loss in Liger's kernel, on all tokens."""
        stage, moved = self.s.units.root.stage, FusedLoss(self.s).moved_bytes
        flops = stage.matmul_flops + stage.backward_matmul_flops
        return fused_s(stage, flops, 3.0, self.s.tokens, moved, self.h, self.k)

    def chunk(self) -> Floats:
        """Seconds of the forward and backward of head and loss, on one chunk of tokens."""
        stage, tokens = self.s.units.root.stage, self.s.tokens / self.s.chunks
        forward = forward_s(stage, tokens, self.h, self.k)
        return forward + backward_s(stage, tokens, self.h, self.k)

    def _stage(self, what: str, stage: Stage) -> Floats:
        """Seconds of the "forward" or "backward" of a block or part, or of a recompute policy."""
        key = ("stage", what, id(stage))
        if key not in self._made:
            tokens = self.s.tokens
            if what == "forward":
                self._made[key] = forward_s(stage, tokens, self.h, self.k)
            elif what == "backward":
                self._made[key] = backward_s(stage, tokens, self.h, self.k)
            else:
                self._made[key] = recompute_s(stage, what, tokens, self.h, self.k)  # type: ignore[arg-type]
        return self._made[key]

    def gather(self, group: Unit) -> Floats:
        """Seconds of the all-gather of a parameter group before its forward."""
        return self._gather(group, group.axis)

    def gather_again(self, group: Unit) -> Floats:
        """Seconds of the all-gather of a parameter group before its backward."""
        return self._gather(group, group.axis if group.of_experts else "reshard")

    def _gather(self, group: Unit, axis: str) -> Floats:
        message = self.s.gathered_bytes(group)
        moved = self._ring(*self.s.c.group(axis), self.k).seconds(message)
        return moved + self._host_copy_s(message)

    def scatter(self, group: Unit) -> Floats:
        """Seconds of the reduce-scatter of a parameter group's gradients."""
        # Gloo runs a reduce-scatter as an all-reduce.
        passes, c = 2.0 if self.h.on_cpu else 1.0, self.s.c
        message = self.s.trained(group) * c.reduce_bytes
        moved = passes * self._ring(*c.group(group.axis), self.k).seconds(message)
        return moved + self._host_copy_s(message)

    def _host_copy_s(self, message: Floats) -> Floats:
        """Seconds to copy an offloaded shard from or to the host; 0 without offload.

        Parameter shards are copied before each all-gather, gradients after each reduce-scatter.
        """
        c = self.s.c
        return np.where(c.offload, message / c.shard / self.h.host_link, 0.0)

    def all_reduce(self, group: Unit) -> Floats:
        """Seconds of the all-reduce of a parameter group's sharded gradients across replicas."""
        c = self.s.c
        message = self.s.trained(group) * c.reduce_bytes / self.s.degree(group)
        return self._all_reduce(c.replicate, c.replicate_stride, self.k).seconds(message)

    def _ring(self, size: Ints, stride: Ints, k: Coefficients) -> Ring:
        """The ring of groups, cached by the identity of its arguments, which must stay alive."""
        key = id(size), id(stride), id(k)
        if key not in self._rings:
            self._rings[key] = ring(size, self.h, k, stride)
        return self._rings[key]

    def _all_reduce(self, replicas: Ints, stride: Ints, k: Coefficients) -> AllReduce:
        """The all-reduce across replicas, cached by identity of its arguments: keep them alive."""
        key = id(replicas), id(stride), id(k)
        if key not in self._all_reduces:
            self._all_reduces[key] = all_reduce(replicas, stride, self.h, k)
        return self._all_reduces[key]

    def exchange(self, axis: str, op: str, calls: Ints, size: Floats) -> Floats:
        """Seconds of `calls` collectives inside blocks, `size` bytes together, along one axis."""
        c, h, k = self.s.c, self.h, self._inner_coefficients
        degree, stride = c.group(axis)
        # The device that gets the most tokens takes longest.
        more = self.s.units.division.routing if axis == "expert" else 1.0
        each = size * more / np.maximum(1, calls)
        if op == "all-reduce":
            seconds = self._all_reduce(degree, stride, k).seconds(each)
        elif op == "all-to-all":
            seconds = all_to_all_s(each, degree, h, k, stride)
        else:
            # Gloo runs a reduce-scatter as an all-reduce.
            passes = 2.0 if self.h.on_cpu and op == "reduce-scatter" else 1.0
            seconds = passes * self._ring(degree, stride, k).seconds(each)
        return calls * (seconds if h.on_cpu else seconds + k.exchange_latency_s)

    def dispatch(self, op: str, calls: Ints, size: Floats) -> Floats:
        """Seconds a CPU spends around collectives inside blocks: DTensor's Python work, and a copy.

        Collectives divide by rows, so parts of a sequence are reordered before or after them. On
        accelerators the host runs ahead, and the copy is part of the measured efficiency.
        """
        copied = 2.0 * size if op in ("all-gather", "reduce-scatter") else np.zeros_like(size)
        return calls * self.k.exchange_latency_s + copied / self.copy_bandwidth

    @cached_property
    def _inner_coefficients(self) -> Coefficients:
        """Coefficients of collectives inside blocks."""
        k = self.k
        # Where not fitted (0), the same as in any other ring.
        fitted = np.greater(k.exchange_efficiency, 0.0)
        link: Any = np.where(fitted, k.exchange_efficiency, k.link_efficiency)
        hop: Any = np.where(fitted, 0.0, k.hop_latency_s)
        return k._replace(link_efficiency=link, hop_latency_s=hop)

    def buckets(self, sizes: tuple[int, ...]) -> Floats:
        """Seconds of the all-reduces of DDP buckets of these sizes (bytes), one after the other."""
        c, total = self.s.c, self.nothing()
        across = self._all_reduce(c.replicate, c.replicate_stride, self.k)
        for size in sizes:
            message = self.nothing() + size
            total = total + across.seconds(message)
        return total

    def compressed(self, moved: float) -> Floats:
        """Seconds to compress and decompress buckets, which read and write `moved` bytes."""
        return self.nothing() + moved / self.copy_bandwidth

    def copy_out(self, unit: Unit) -> Floats:
        """Seconds to copy a gathered unit out of its flat buffer.

        Each element is read and written once; twice if not sharded along its first dimension.
        """
        again = self.s.rearranged(unit) * self.s.c.param_bytes
        moved = 2.0 * (self.s.gathered_bytes(unit) + again)
        return moved / self.copy_bandwidth + self.hook_s

    def copy_in(self, unit: Unit) -> Floats:
        """Seconds to copy a unit's gradients into the input of their reduce-scatter."""
        c = self.s.c
        # A scatter is followed by an all-reduce across replicas.
        hooks = self.hook_s * np.where(c.replicate > 1, 2.0, 1.0)
        again = 2.0 * self.s.rearranged_trained(unit) * c.param_bytes
        moved: Floats = self.s.trained(unit) * (c.param_bytes + c.reduce_bytes) + again
        return moved / self.copy_bandwidth + hooks

    def optimizer(self) -> Floats:
        """Seconds of the optimizer step, and the fixed seconds of a step."""
        s, c, h = self.s, self.s.c, self.h
        bandwidth = np.where(c.offload | c.offload_optimizer, h.host_memory, h.memory_bandwidth)
        # Parameters and gradients, and the states.
        moved = 2.0 * s.updated_bytes + s.optimizer_bytes
        # Gradients to the host, weights back to the device.
        copied = np.where(c.offload_optimizer, 2.0 * s.gradient_bytes / h.host_link, 0.0)
        return self.k.optimizer_factor * moved / bandwidth + copied + self.k.overhead_s

    def saved_moved(self, unit: Unit, recomputed: Ints) -> Floats:
        """Seconds to copy what a unit's blocks save to host memory, or back to the device."""
        total: Floats = np.zeros(len(self.s.c))
        for number, block in enumerate(unit.blocks):
            total = total + self.s.saved(block.stage, recomputed > number)
        return total / self.h.host_link
