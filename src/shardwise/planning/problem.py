"""What is to be planned: a model, a cluster, a job, and the settings that are not up for choice."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.predict.configurations import Configurations, Floats
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.memory import memory_of
from shardwise.predict.program.step import Steps, emit_steps
from shardwise.predict.rates import hardware_of
from shardwise.predict.time import Times, steps_on
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DType
from shardwise.spec.job import Job
from shardwise.spec.lookup import Model, ModuleRef
from shardwise.spec.strategy import Strategy
from shardwise.units.division import Division
from shardwise.units.load import load_units
from shardwise.units.unit import ModelUnits

# Between nodes, and inside one.
Way = Literal["network_bandwidth", "link_bandwidth"]


class Problem(NamedTuple):
    """One question to the search. `base` holds dtypes and whether blocks are compiled."""

    model: Model
    cluster: ClusterSpec
    job: Job
    base: Strategy
    # The stack that trains the model shards every tensor along its first dimension.
    along_rows: bool = False


class Units:
    """The model's units by what shapes them, each made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[tuple[object, ...], ModelUnits] = {}

    @property
    def blocks(self) -> int:
        """The model's number of blocks."""
        return len(self.of(self._problem.base.but(blocks_per_unit=1)).blocks)

    @property
    def can_chunk(self) -> bool:
        """Whether the engine can run the loss in chunks: not of a module of one's own."""
        return not isinstance(self._problem.model, ModuleRef)

    @property
    def can_split(self) -> bool:
        """Whether embedding and head can be units of their own: not if they are tied."""
        return self.can_chunk and not self.of(self._problem.base.but(blocks_per_unit=1)).tied

    def key(self, strategy: Strategy) -> tuple[object, ...]:
        """What strategies must share to have the same units."""
        # Frozen weights of a module of one's own may compute in a dtype that sharding casts.
        casts = strategy.sharded or not isinstance(self._problem.model, ModuleRef)
        division = Division.of(strategy)
        return strategy.autocast, casts, strategy.compile, division, strategy.blocks_per_unit

    def of(self, strategy: Strategy) -> ModelUnits:
        key = self.key(strategy)
        if key not in self._made:
            if strategy.blocks_per_unit == 1:
                seq_len = self._problem.job.seq_len
                units = load_units(self._problem.model, seq_len, strategy)
                along_rows = self._problem.along_rows
                self._made[key] = units.sharded_along_rows() if along_rows else units
            else:
                self._made[key] = self.of(strategy.but(blocks_per_unit=1)).grouped(
                    strategy.blocks_per_unit
                )
        return self._made[key]


def steps(units: ModelUnits, c: Configurations, problem: Problem) -> Steps:
    """The programs of rows, for memory and for times on any network."""
    return emit_steps(units, c, problem.job.optimizer, waits=problem.cluster.device.is_cpu)


def peaks(priced: Steps, problem: Problem) -> tuple[Floats, Floats]:
    """Bytes of tensors at the peak of every row, and with the pools the allocator keeps."""
    memory = memory_of(priced, by_term=False)
    pooled = 0.0 if problem.cluster.device.is_cpu else memory.pooled_bytes
    return memory.peak_bytes, memory.peak_bytes + pooled


def times(
    priced: Steps,
    cluster: ClusterSpec,
    dtype: DType,
    networks: Floats | None = None,
    way: Way | None = None,
    *,
    latency: bool = True,
) -> Times:
    """Seconds of every row of a cluster whose rates are known.

    Without `latency`, messages take no longer than their bytes.

    `networks` are several to price at once: how many times as fast a way between devices is in
    each of them, the slowest way where none is named.
    """
    k, hardware = coefficients_for(cluster), hardware_of(cluster, dtype)
    assert k is not None, "checked before the search"
    assert hardware is not None, "checked before the search"
    if networks is not None:
        slowest: Way = "network_bandwidth" if cluster.nodes > 1 else "link_bandwidth"
        changed = way or slowest
        rate = getattr(hardware, changed) * networks[:, None]
        hardware = hardware._replace(**{changed: rate})
    return steps_on(priced, hardware, k if latency else k.without_latency)
