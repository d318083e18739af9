"""The input of a search: a model, a cluster, a job, and the settings that are not searched."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from shardwise.predict.configurations import Configurations, Floats
from shardwise.predict.kernels import coefficients_for, hardware_of
from shardwise.predict.memory import memory_of
from shardwise.predict.program.step import Steps, emit_steps
from shardwise.predict.time import Times, steps_on
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DType
from shardwise.spec.job import Job
from shardwise.spec.lookup import Model, ModuleRef
from shardwise.spec.strategy import Strategy
from shardwise.units.division import Division
from shardwise.units.load import job_units
from shardwise.units.unit import ModelUnits

# The bandwidth between nodes, and inside a node.
BandwidthField = Literal["network_bandwidth", "link_bandwidth"]


class Problem(NamedTuple):
    """The input of a search. `base` holds the settings that are not searched, such as dtypes."""

    model: Model
    cluster: ClusterSpec
    job: Job
    base: Strategy
    # Whether the stack that trains the model shards every tensor along its first dimension.
    along_rows: bool = False


class Units:
    """A cache of the problem's model units, by the settings that change units."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[tuple[object, ...], ModelUnits] = {}

    @property
    def blocks(self) -> int:
        """The model's number of blocks."""
        return len(self.of(self._problem.base.but(blocks_per_unit=1)).blocks)

    @property
    def experts(self) -> int:
        """The number of experts of a block; 0 if the model is no mixture of experts.

        Blocks with different numbers share what divides both.
        """
        units = self.of(self._problem.base.but(blocks_per_unit=1, expert=1))
        return math.gcd(*(block.stage.experts for block in units.blocks))

    @property
    def can_chunk(self) -> bool:
        """Whether the engine can run the loss in chunks: not for a user's own module."""
        return not isinstance(self._problem.model, ModuleRef)

    @property
    def can_split(self) -> bool:
        """Whether embedding and head can be separate units: not if tied, or in a user's module."""
        return self.can_chunk and not self.of(self._problem.base.but(blocks_per_unit=1)).tied

    def key(self, strategy: Strategy) -> tuple[object, ...]:
        """A key that is equal for strategies with the same units."""
        # Frozen weights of a user's module may have a compute dtype that sharding casts.
        casts = strategy.sharded or not isinstance(self._problem.model, ModuleRef)
        division = Division.of(strategy)
        own = strategy.compile, strategy.attention, strategy.dispatch
        return strategy.autocast, casts, own, division, strategy.blocks_per_unit

    def of(self, strategy: Strategy) -> ModelUnits:
        """The model's units under a strategy."""
        key = self.key(strategy)
        if key not in self._made:
            if strategy.blocks_per_unit == 1:
                problem = self._problem
                units = job_units(problem.model, problem.job, strategy, problem.cluster)
                along_rows = self._problem.along_rows
                self._made[key] = units.sharded_along_rows() if along_rows else units
            else:
                self._made[key] = self.of(strategy.but(blocks_per_unit=1)).grouped(
                    strategy.blocks_per_unit
                )
        return self._made[key]


def steps(units: ModelUnits, c: Configurations, problem: Problem) -> Steps:
    """The programs of one step of each row, from which `peaks` and `times` are computed."""
    return emit_steps(units, c, problem.job.optimizer, waits=problem.cluster.device.is_cpu)


def peaks(priced: Steps, problem: Problem) -> tuple[Floats, Floats]:
    """Bytes per device of each row: tensors at the peak, and the peak plus allocator pools."""
    memory = memory_of(priced, by_term=False)
    pooled = 0.0 if problem.cluster.device.is_cpu else memory.pooled_bytes
    return memory.peak_bytes, memory.peak_bytes + pooled


def times(
    priced: Steps,
    cluster: ClusterSpec,
    dtype: DType,
    networks: Floats | None = None,
    way: BandwidthField | None = None,
    *,
    latency: bool = True,
) -> Times:
    """Seconds of one step of each row, on a cluster whose rates are known.

    Without `latency`, the network latency of messages is zero.

    `networks` predicts several networks at once: each factor multiplies the bandwidth named by
    `way`; without `way` that of the network, or on a single node of the link.
    """
    k, hardware = coefficients_for(cluster), hardware_of(cluster, dtype)
    assert k is not None, "checked before the search"
    assert hardware is not None, "checked before the search"
    if networks is not None:
        slowest: BandwidthField = "network_bandwidth" if cluster.nodes > 1 else "link_bandwidth"
        changed = way or slowest
        rate = getattr(hardware, changed) * networks[:, None]
        hardware = hardware._replace(**{changed: rate})
    return steps_on(priced, hardware, k if latency else k.without_latency)
