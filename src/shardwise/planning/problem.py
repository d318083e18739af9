"""What is to be planned: a model, a cluster, a job, and the settings that are not up for choice."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.predict.configurations import Configurations, Floats
from shardwise.predict.memory import predict_memory
from shardwise.predict.time import Times, predict_time
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DType
from shardwise.spec.job import OPTIMIZER_STATES, Job
from shardwise.spec.lookup import Model
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units
from shardwise.units.unit import ModelUnits


class Problem(NamedTuple):
    """One question to the search. `base` holds dtypes and whether blocks are compiled."""

    model: Model
    cluster: ClusterSpec
    job: Job
    base: Strategy

    @property
    def states(self) -> int:
        return OPTIMIZER_STATES[self.job.optimizer]


class Units:
    """The model's units by what shapes them, each made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[tuple[bool, int], ModelUnits] = {}

    @property
    def blocks(self) -> int:
        """The model's number of blocks."""
        return len(self.of(self._problem.base.but(blocks_per_unit=1)).blocks)

    def of(self, strategy: Strategy) -> ModelUnits:
        key = (strategy.autocast, strategy.blocks_per_unit)
        if key not in self._made:
            if key[1] == 1:
                seq_len = self._problem.job.seq_len
                self._made[key] = load_units(self._problem.model, seq_len, strategy)
            else:
                self._made[key] = self.of(strategy.but(blocks_per_unit=1)).grouped(key[1])
        return self._made[key]


def peaks(units: ModelUnits, c: Configurations, problem: Problem) -> tuple[Floats, Floats]:
    """Bytes of tensors at the peak of every row, and with the pools the allocator keeps."""
    memory = predict_memory(units, c, problem.states, by_term=False)
    pooled = 0.0 if problem.cluster.device.is_cpu else memory.pooled_bytes
    return memory.peak_bytes, memory.peak_bytes + pooled


def times(
    units: ModelUnits,
    c: Configurations,
    cluster: ClusterSpec,
    dtype: DType,
    states: int,
    network: Floats | None = None,
) -> Times:
    """Seconds of every row of a cluster whose rates are known."""
    found = predict_time(units, c, cluster, dtype, states, network=network)
    assert found is not None, "checked before the search"
    return found
