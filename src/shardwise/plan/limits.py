"""What holds a configuration back, and how much of everything else is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.plan.price import price_one, scaled_network
from shardwise.plan.problem import Problem, Units
from shardwise.plan.rows import Candidate
from shardwise.plan.search import WITH_MORE_MEMORY, Found
from shardwise.step import Bottleneck

# A step this much longer counts as slower.
NOTICED = 0.05
# Twice the network has to bring this much for the network to be what limits.
WORTH = 0.03


class Limits(NamedTuple):
    """The binding constraint of a configuration, gains from relaxing each, and slack."""

    binding: Bottleneck
    # Relative gains in tokens/s, re-planned for memory and with the same configuration for the
    # network.
    twice_network: float
    more_memory: float
    with_memory: Candidate | None
    free_bytes: float
    # The network could be this many times slower before a step takes 5 % longer; None where
    # nothing moves or no slowness in reach does that.
    network_slack: float | None


def limits_of(problem: Problem, units: Units, found: Found, winner: Candidate) -> Limits:
    """Relax one constraint after the other and see what it brings."""
    roomier = found.best(memory=WITH_MORE_MEMORY)
    more_memory = roomier.tokens_per_s / winner.tokens_per_s - 1 if roomier else 0.0
    moves = winner.strategy.devices > 1
    twice = 0.0
    if moves:
        faster = price_one(problem, units, winner.strategy, scaled_network(problem.cluster, 2.0))
        twice = winner.step_s / faster.step_s - 1
    slack = _network_slack(problem, units, winner) if moves else None
    if twice >= max(WORTH, more_memory):
        binding: Bottleneck = "bandwidth"
    else:
        binding = "memory" if more_memory >= WORTH else "compute"
    return Limits(
        binding=binding,
        twice_network=twice,
        more_memory=max(more_memory, 0.0),
        with_memory=roomier,
        free_bytes=found.limit_bytes - winner.peak_bytes,
        network_slack=slack,
    )


def _network_slack(problem: Problem, units: Units, winner: Candidate) -> float | None:
    def slower(factor: float) -> bool:
        cluster = scaled_network(problem.cluster, 1 / factor)
        step = price_one(problem, units, winner.strategy, cluster).step_s
        return step > winner.step_s * (1 + NOTICED)

    return first_true(slower, 1.0, 1024.0)


def first_true(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """The least value between two at which something begins to hold, to a percent.

    None where it does not hold at `high`; `low` where it holds there already.
    """
    if holds(low):
        return low
    if not holds(high):
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def crossover(problem: Problem, units: Units, winner: Candidate, other: Candidate) -> float | None:
    """The network, as a multiple of today's, at which `other` becomes as fast as `winner`.

    Above 1 it takes a faster one, below 1 a slower; None where neither does it.
    """

    def overtaken(factor: float) -> bool:
        cluster = scaled_network(problem.cluster, factor)
        one = price_one(problem, units, winner.strategy, cluster).tokens_per_s
        return price_one(problem, units, other.strategy, cluster).tokens_per_s >= one

    faster = first_true(overtaken, 1.0, 64.0)
    if faster is not None:
        return faster
    slower = first_true(lambda inverse: overtaken(1 / inverse), 1.0, 64.0)
    return None if slower is None else 1 / slower
