"""Degrees of tensor, context and expert parallelism that a plan may choose; a bound on their speed.

Tensor and context parallelism form groups of devices that work on the same sequences: the rest of a
plan treats each group as one device of a smaller cluster. Expert parallelism takes no devices.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from shardwise.planning.layout import UNDIVIDED, Degrees
from shardwise.planning.problem import Problem
from shardwise.planning.space import Space
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import coefficients_for, hardware_of
from shardwise.predict.program.prices import Prices
from shardwise.predict.program.sizes import Sizes
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.units.division import Division, problems_of_division
from shardwise.units.unit import ModelUnits

# The least tokens of a sequence per device; fewer would not keep a device busy.
LEAST_TOKENS = 512
# From this length on, context parallelism is as usual as tensor parallelism.
LONG_SEQUENCE = 2**14


def degrees(problem: Problem, space: Space, experts: int = 0) -> list[Degrees]:
    """The degrees possible for cluster and model, the smallest first.

    Degrees are powers of two, and a tensor group stays inside a node. Only models with formulas and
    without an adapter have tensor and context parallelism, and only a mixture of `experts` experts
    a block has expert parallelism.
    """
    cluster, model = problem.cluster, problem.model
    if experts:
        both = _powers(math.gcd(experts, cluster.devices))
        return [Degrees(expert=each) for each in both if each == 1 or space.divides(1, 1, each)]
    if not isinstance(model, ModelSpec) or model.adapter is not None:
        return [UNDIVIDED]
    found = []
    for tensor in _powers(cluster.devices_per_node):
        for context in _powers(cluster.devices // tensor):
            few = (model.heads // tensor) % context > 0
            ring = context > 1 and (few or problem.base.context_method == "ring")
            pair = Degrees(tensor, context, ring)
            wanted = pair == UNDIVIDED or space.divides(tensor, context)
            if _through_host(pair, problem) and (space.tensor, space.context) == (None, None):
                wanted = False
            if wanted and (pair == UNDIVIDED or _is_possible(pair, problem, model)):
                found.append(pair)
    return sorted(found, key=lambda pair: (pair.inner, pair.context))


def is_last_resort(pair: Degrees, problem: Problem) -> bool:
    """Whether a pair uses context parallelism although sequences are shorter than LONG_SEQUENCE."""
    return pair.context > 1 and problem.job.seq_len < LONG_SEQUENCE


def _through_host(pair: Degrees, problem: Problem) -> bool:
    """Whether collectives inside blocks would go through host memory without a need for them.

    That is on devices without peer-to-peer copies; long sequences need context parallelism.
    """
    short = problem.job.seq_len < LONG_SEQUENCE
    return not problem.cluster.device.p2p and (pair.tensor > 1 or (pair.context > 1 and short))


def _is_possible(pair: Degrees, problem: Problem, model: ModelSpec) -> bool:
    """Whether a pair divides the cluster's devices, the sequence and the model."""
    seq_len, cluster = problem.job.seq_len, problem.cluster
    if cluster.devices % pair.inner or (pair.context > 1 and seq_len < LEAST_TOKENS * pair.inner):
        return False
    division = Division(pair.tensor, True, pair.context, "ring" if pair.ring else "ulysses")
    return not problems_of_division(model, division, seq_len)


def _powers(most: int) -> list[int]:
    """Powers of two that divide a number."""
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0]


def of_groups(cluster: ClusterSpec, inner: int) -> ClusterSpec:
    """A smaller cluster in which each device stands for a group of `inner` devices."""
    if inner == 1:
        return cluster
    per_node = cluster.devices_per_node
    if per_node % inner == 0:
        return cluster.but(devices_per_node=per_node // inner)
    return cluster.but(nodes=cluster.devices // inner, devices_per_node=1)


def least_seconds(problem: Problem, units: ModelUnits, strategy: Strategy) -> float:
    """Lower bound of the seconds of a micro-batch: compute, and collectives inside blocks."""
    k = coefficients_for(problem.cluster)
    hardware = hardware_of(problem.cluster, strategy.param_dtype)
    assert k is not None, "checked before the search"
    assert hardware is not None, "checked before the search"
    sizes = Sizes(units, Configurations.of([strategy]), problem.job.optimizer)
    prices = Prices(sizes, hardware, k)
    none = np.zeros(1, dtype=np.int64)
    kinds = Counter(units.units)
    total = 0.0
    for unit, times in kinds.items():
        total += times * float((prices.forward(unit) + prices.backward(unit, none))[0])
        for block in unit.blocks:
            stages = block.stage.parts or (block.stage,)
            passes = [(s.exchanges.forward, s.exchanges.backward) for s in stages]
            for one in (one for both in passes for run in both for one in run):
                size = times * one.bytes * sizes.tokens
                seconds = prices.exchange(one.axis, one.op, none + times * one.calls, size)
                total += float(seconds[0])
    return total
