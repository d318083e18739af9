"""Seconds of the pieces of a step: compute, copies, collectives and the optimizer."""

from __future__ import annotations

import numpy as np

from shardwise.predict.compute import backward_s, forward_s, recompute_s
from shardwise.predict.configurations import Floats, Ints
from shardwise.predict.network import all_reduce_s, ring_s
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.units.unit import Unit


class NoPrices:
    """Everything takes no time: for readers of memory and traffic alone."""

    # FSDP's hooks wait for each collective, as they do with Gloo.
    waits = False
    # Seconds lost per second of compute that runs beside a collective.
    contention: Floats | float = 0.0

    def __init__(self, rows: int) -> None:
        self._nothing: Floats = np.zeros(rows)

    def forward(self, unit: Unit) -> Floats:
        return self._nothing

    def backward(self, unit: Unit, recomputed: Ints) -> Floats:
        """`recomputed` of its blocks, the first ones, run their forward again."""
        return self._nothing

    def root_backward(self) -> Floats:
        return self._nothing

    def gather(self, unit: Unit) -> Floats:
        return self._nothing

    def gather_again(self, unit: Unit) -> Floats:
        """For the backward, from the group that an integer reshard leaves."""
        return self._nothing

    def scatter(self, unit: Unit) -> Floats:
        return self._nothing

    def all_reduce(self, unit: Unit) -> Floats:
        """Of a unit's sharded gradients, across replicas."""
        return self._nothing

    def bucket(self, bytes_: int) -> Floats:
        """The all-reduce of one of DDP's buckets."""
        return self._nothing

    def copy_out(self, unit: Unit) -> Floats:
        return self._nothing

    def copy_in(self, unit: Unit) -> Floats:
        return self._nothing

    def optimizer(self) -> Floats:
        return self._nothing


class Prices(NoPrices):
    """Seconds on a cluster; each piece of each kind of unit is priced once."""

    def __init__(self, sizes: Sizes, hardware: Hardware, k: Coefficients) -> None:
        super().__init__(len(sizes.c))
        self.s, self.h, self.k = sizes, hardware, k
        self.waits = hardware.gloo
        self.contention = k.contention
        # A CPU copies as it computes: at a share of its bandwidth.
        factor = k.elementwise_factor if hardware.gloo else 1.0
        self.copy_bandwidth = hardware.memory_bandwidth / factor
        self.hook_s = k.hook_s if hardware.gloo else 0.0
        self._made: dict[tuple[object, ...], Floats] = {}

    def forward(self, unit: Unit) -> Floats:
        """Blocks run one by one, also within a unit."""
        return sum(self._stage("forward", block) for block in unit.blocks)  # type: ignore[return-value]

    def backward(self, unit: Unit, recomputed: Ints) -> Floats:
        total: Floats = np.zeros(len(self.s.c))
        for number, block in enumerate(unit.blocks):
            again = np.where(self.s.c.selective, self._stage("selective", block), 0.0)
            if (recomputed > number).any():
                again = np.where(recomputed > number, self._stage("full", block), again)
            total = total + self._stage("backward", block) + again
        return total

    def root_backward(self) -> Floats:
        return self._stage("backward", self.s.units.root)

    def _stage(self, what: str, block: Unit) -> Floats:
        key = (what, id(block))
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
        c = self.s.c
        group = np.where(c.reshard_group > 0, c.reshard_group, c.shard)
        return self._gather(unit, group)

    def _gather(self, unit: Unit, group: Ints) -> Floats:
        elements, itemsize = self.s.elements(unit), self.s.c.param_bytes
        moved = ring_s(elements * itemsize, group, self.h, self.k)
        return moved + self._moved_to_host(elements, itemsize)

    def scatter(self, unit: Unit) -> Floats:
        # Gloo runs a reduce-scatter as an all-reduce.
        passes, c = 2.0 if self.h.gloo else 1.0, self.s.c
        message = self.s.trained(unit) * c.reduce_bytes
        moved = passes * ring_s(message, c.shard, self.h, self.k)
        return moved + self._moved_to_host(self.s.trained(unit), c.reduce_bytes)

    def _moved_to_host(self, elements: Floats, itemsize: Ints) -> Floats:
        """Offloaded shards come from the host before each gather and go back after each scatter."""
        c = self.s.c
        return np.where(c.offload, elements / c.shard * itemsize / self.h.host_link, 0.0)

    def all_reduce(self, unit: Unit) -> Floats:
        c = self.s.c
        message = self.s.trained(unit) * c.reduce_bytes / c.shard
        return all_reduce_s(message, c.replicate, c.shard, self.h, self.k)

    def bucket(self, bytes_: int) -> Floats:
        c = self.s.c
        return all_reduce_s(np.full(len(c), float(bytes_)), c.replicate, c.shard, self.h, self.k)

    def copy_out(self, unit: Unit) -> Floats:
        """Read and written once each."""
        moved = 2.0 * self.s.elements(unit) * self.s.c.param_bytes
        return moved / self.copy_bandwidth + self.hook_s

    def copy_in(self, unit: Unit) -> Floats:
        c = self.s.c
        # A scatter is followed by an all-reduce across replicas.
        hooks = self.hook_s * np.where(c.replicate > 1, 2.0, 1.0)
        moved = self.s.trained(unit) * (c.param_bytes + c.reduce_bytes)
        return moved / self.copy_bandwidth + hooks

    def optimizer(self) -> Floats:
        bandwidth = np.where(self.s.c.offload, self.h.host_memory, self.h.memory_bandwidth)
        # Parameters and gradients, and the states of both moments or of one.
        moved = self.s.gradient_bytes * (2 + self.s.states)
        return self.k.optimizer_factor * moved / bandwidth + self.k.overhead_s
