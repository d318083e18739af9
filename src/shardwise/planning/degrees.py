"""Degrees of tensor and context parallelism that a plan may choose, and how far each can get.

Both make groups of devices that work on the same sequences. The rest of a plan sees a group as one
device: a smaller cluster whose devices are groups.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from shardwise.planning.layout import WHOLE, Degrees
from shardwise.planning.problem import Problem
from shardwise.planning.space import Space
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.program.prices import Prices
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.rates import hardware_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.units.division import Division, problems_of_division
from shardwise.units.unit import ModelUnits

# A part of a sequence with fewer tokens than this keeps no device busy.
LEAST_TOKENS = 512
# From this length on, dividing sequences is as usual as dividing matrices.
LONG_SEQUENCE = 2**14


def degrees(problem: Problem, space: Space) -> list[Degrees]:
    """Every pair that divides the cluster and the model, the simplest first.

    A tensor group stays inside a node.
    """
    cluster, model = problem.cluster, problem.model
    if not isinstance(model, ModelSpec) or model.adapter is not None:
        return [WHOLE]
    found = []
    for tensor in _powers(cluster.devices_per_node):
        for context in _powers(cluster.devices // tensor):
            few = (model.heads // tensor) % context > 0
            ring = context > 1 and (few or problem.base.context_method == "ring")
            pair = Degrees(tensor, context, ring)
            wanted = pair == WHOLE or space.divides(tensor, context)
            if _through_host(pair, problem) and (space.tensor, space.context) == (None, None):
                wanted = False
            if wanted and (pair == WHOLE or _possible(pair, problem, model)):
                found.append(pair)
    return sorted(found, key=lambda pair: (pair.inner, pair.context))


def is_last_resort(pair: Degrees, problem: Problem) -> bool:
    """Whether a pair divides sequences that are not long."""
    return pair.context > 1 and problem.job.seq_len < LONG_SEQUENCE


def _through_host(pair: Degrees, problem: Problem) -> bool:
    """Whether every layer would wait for copies through host memory, and no length asks for it."""
    short = problem.job.seq_len < LONG_SEQUENCE
    return not problem.cluster.device.p2p and (pair.tensor > 1 or (pair.context > 1 and short))


def _possible(pair: Degrees, problem: Problem, model: ModelSpec) -> bool:
    seq_len, cluster = problem.job.seq_len, problem.cluster
    if cluster.devices % pair.inner or (pair.context > 1 and seq_len < LEAST_TOKENS * pair.inner):
        return False
    division = Division(pair.tensor, True, pair.context, "ring" if pair.ring else "ulysses")
    return not problems_of_division(model, division, seq_len)


def _powers(most: int) -> list[int]:
    """Powers of two that divide a number."""
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0]


def of_groups(cluster: ClusterSpec, inner: int) -> ClusterSpec:
    """The cluster with a group of `inner` devices in place of each device."""
    if inner == 1:
        return cluster
    per_node = cluster.devices_per_node
    if per_node % inner == 0:
        return cluster.but(devices_per_node=per_node // inner)
    return cluster.but(nodes=cluster.devices // inner, devices_per_node=1)


def least_seconds(problem: Problem, units: ModelUnits, strategy: Strategy) -> float:
    """A micro-batch takes no less: compute, and the collectives inside blocks."""
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
            for one in (*block.stage.exchanges.forward, *block.stage.exchanges.backward):
                size = times * one.bytes * sizes.tokens
                seconds = prices.exchange(one.axis, one.op, none + times * one.calls, size)
                total += float(seconds[0])
    return total
