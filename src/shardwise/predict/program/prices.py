"""Seconds of the pieces of a step: compute, copies, collectives and the optimizer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from shardwise.predict.compute import backward_s, forward_s, recompute_s
from shardwise.predict.configurations import Floats, Ints
from shardwise.predict.network import AllReduce, Ring, all_reduce, all_to_all_s, ring
from shardwise.predict.program.events import Cost
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.units.unit import Unit


class Prices:
    """Seconds on a cluster; each piece of each kind of unit is priced once."""

    def __init__(self, sizes: Sizes, hardware: Hardware, k: Coefficients) -> None:
        self.s, self.h, self.k = sizes, hardware, k
        # Seconds lost per second of compute that runs beside a collective.
        self.contention: Floats | float = k.contention
        # A CPU copies as it computes: at a share of its bandwidth.
        factor = k.elementwise_factor if hardware.on_cpu else 1.0
        self.copy_bandwidth = hardware.memory_bandwidth / factor
        self.hook_s = k.hook_s if hardware.on_cpu else 0.0
        self._made: dict[tuple[object, ...], Floats] = {}
        self._by_cost: dict[int, Floats] = {}
        self._rings: dict[tuple[int, int, int], Ring] = {}
        self._all_reduces: dict[tuple[int, int, int], AllReduce] = {}

    def of(self, cost: Cost) -> Floats:
        """Seconds of a piece of the step: what the method of its name says."""
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
        """Blocks run one by one, also within a unit."""
        return sum(
            self._stage("forward", block) + self._dequantised(block) for block in unit.blocks
        )  # type: ignore[return-value]

    def _dequantised(self, block: Unit) -> Floats | float:
        """Quantised weights are read as stored and written in the compute dtype, for each use."""
        if not block.quantised:
            return 0.0
        elements, stored = self.s.packed(block)
        return (stored + elements * self.s.c.param_bytes) / self.copy_bandwidth

    def backward(self, unit: Unit, recomputed: Ints) -> Floats:
        total: Floats = np.zeros(len(self.s.c))
        for number, block in enumerate(unit.blocks):
            again = np.where(self.s.c.selective, self._stage("selective", block), 0.0)
            if (recomputed > number).any():
                again = np.where(recomputed > number, self._stage("full", block), again)
            # Once more than the forward does where blocks recompute.
            dequantised = self._dequantised(block) * (1 + (recomputed > number))
            total = total + self._stage("backward", block) + again + dequantised
        return total

    def root_backward(self) -> Floats:
        return self._stage("backward", self.s.units.root)

    def chunk(self) -> Floats:
        """Head and loss, forward and backward, of one chunk of the tokens."""
        stage, tokens = self.s.units.root.stage, self.s.tokens / self.s.chunks
        forward = forward_s(stage, tokens, self.h, self.k)
        return forward + backward_s(stage, tokens, self.h, self.k)

    def _stage(self, what: str, block: Unit) -> Floats:
        key = ("stage", what, id(block))
        if key not in self._made:
            stage, tokens = block.stage, self.s.tokens
            if what == "forward":
                self._made[key] = forward_s(stage, tokens, self.h, self.k)
            elif what == "backward":
                self._made[key] = backward_s(stage, tokens, self.h, self.k)
            else:
                self._made[key] = recompute_s(stage, what, tokens, self.h, self.k)  # type: ignore[arg-type]
        return self._made[key]

    def gather(self, unit: Unit) -> Floats:
        return self._gather(unit, self.s.c.shard)

    def gather_again(self, unit: Unit) -> Floats:
        """For the backward, from the group that an integer reshard leaves."""
        return self._gather(unit, self._left_by_reshard)

    @cached_property
    def _left_by_reshard(self) -> Ints:
        c = self.s.c
        return np.where(c.reshard_group > 0, c.reshard_group, c.shard)

    def _gather(self, unit: Unit, group: Ints) -> Floats:
        message = self.s.gathered_bytes(unit)
        moved = self._ring(group, self.s.c.shard_stride, self.k).seconds(message)
        return moved + self._moved_to_host(message)

    def scatter(self, unit: Unit) -> Floats:
        # Gloo runs a reduce-scatter as an all-reduce.
        passes, c = 2.0 if self.h.on_cpu else 1.0, self.s.c
        message = self.s.trained(unit) * c.reduce_bytes
        moved = passes * self._ring(c.shard, c.shard_stride, self.k).seconds(message)
        return moved + self._moved_to_host(message)

    def _moved_to_host(self, message: Floats) -> Floats:
        """Offloaded shards come from the host before each gather and go back after each scatter."""
        c = self.s.c
        return np.where(c.offload, message / c.shard / self.h.host_link, 0.0)

    def all_reduce(self, unit: Unit) -> Floats:
        """Of a unit's sharded gradients, across replicas."""
        c = self.s.c
        message = self.s.trained(unit) * c.reduce_bytes / c.shard
        return self._all_reduce(c.replicate, c.replicate_stride, self.k).seconds(message)

    def _ring(self, size: Ints, stride: Ints, k: Coefficients) -> Ring:
        """The ring among groups; `size` and `stride` live as long as this."""
        key = id(size), id(stride), id(k)
        if key not in self._rings:
            self._rings[key] = ring(size, self.h, k, stride)
        return self._rings[key]

    def _all_reduce(self, replicas: Ints, stride: Ints, k: Coefficients) -> AllReduce:
        """The all-reduce across replicas; `replicas` and `stride` live as long as this."""
        key = id(replicas), id(stride), id(k)
        if key not in self._all_reduces:
            self._all_reduces[key] = all_reduce(replicas, stride, self.h, k)
        return self._all_reduces[key]

    def exchange(self, axis: str, op: str, calls: Ints, size: Floats) -> Floats:
        """Collectives inside blocks, among the devices of a tensor or a context group."""
        c, h, k = self.s.c, self.h, self._inside
        degree, stride = c.tensor, c.tensor_stride
        if axis == "context":
            degree, stride = c.context, c.shard_stride
        each = size / np.maximum(1, calls)
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
        """What a CPU does around collectives inside blocks: DTensor's work in Python, and a copy.

        Collectives divide by rows, so parts of a sequence are put in order before or after them.
        Accelerators run behind their host, and the copy is in the efficiency of their exchanges.
        """
        copied = 2.0 * size if op in ("all-gather", "reduce-scatter") else np.zeros_like(size)
        return calls * self.k.exchange_latency_s + copied / self.copy_bandwidth

    @cached_property
    def _inside(self) -> Coefficients:
        """Coefficients of collectives inside blocks."""
        k = self.k
        # Of one run each, where many were fitted together; as in any ring, where not fitted.
        fitted = np.greater(k.exchange_efficiency, 0.0)
        link: Any = np.where(fitted, k.exchange_efficiency, k.link_efficiency)
        hop: Any = np.where(fitted, 0.0, k.hop_latency_s)
        return k._replace(link_efficiency=link, hop_latency_s=hop)

    def buckets(self, sizes: tuple[int, ...]) -> Floats:
        """The all-reduces of some of DDP's buckets, one after the other."""
        c, total = self.s.c, self.nothing()
        across = self._all_reduce(c.replicate, c.replicate_stride, self.k)
        for size in sizes:
            message = self.nothing() + size
            total = total + across.seconds(message)
        return total

    def copy_out(self, unit: Unit) -> Floats:
        """Read and written once each; twice what is not sharded along its first dimension."""
        again = self.s.rearranged(unit) * self.s.c.param_bytes
        moved = 2.0 * (self.s.gathered_bytes(unit) + again)
        return moved / self.copy_bandwidth + self.hook_s

    def copy_in(self, unit: Unit) -> Floats:
        c = self.s.c
        # A scatter is followed by an all-reduce across replicas.
        hooks = self.hook_s * np.where(c.replicate > 1, 2.0, 1.0)
        again = 2.0 * self.s.rearranged_trained(unit) * c.param_bytes
        moved: Floats = self.s.trained(unit) * (c.param_bytes + c.reduce_bytes) + again
        return moved / self.copy_bandwidth + hooks

    def optimizer(self) -> Floats:
        bandwidth = np.where(self.s.c.offload, self.h.host_memory, self.h.memory_bandwidth)
        # Parameters and gradients, and the states.
        moved = 2.0 * self.s.gradient_bytes + self.s.optimizer_bytes
        return self.k.optimizer_factor * moved / bandwidth + self.k.overhead_s
