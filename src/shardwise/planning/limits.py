"""What limits a configuration, and the slack in everything else."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shardwise.planning.layout import Degrees
from shardwise.planning.price import scaled_link, scaled_network
from shardwise.planning.problem import Problem, Units, steps, times
from shardwise.planning.rows import Candidate
from shardwise.planning.search import MIN_GAIN, WITH_MORE_MEMORY, Found, Search
from shardwise.predict.configurations import Configurations, Floats
from shardwise.spec.cluster import ClusterSpec
from shardwise.step import Bottleneck

# A step this much longer counts as slower.
SLOWDOWN_THRESHOLD = 0.05
# How far from today's network another is looked for: up to four times.
MOST_DOUBLINGS = 2

# A crossover has to hold for all rows this many doublings beyond it.
CONFIRMED_BEYOND = 5 / 32


class Limits(NamedTuple):
    """The binding constraint of a configuration, gains from relaxing each, and slack."""

    binding: Bottleneck
    # Relative gains in tokens/s of the fastest that fits: each is planned again.
    twice_network: float
    # Of the link inside a node, where a network connects several.
    twice_link: float
    more_memory: float
    with_memory: Candidate | None
    free_bytes: float
    # The network could be this many times slower before a step takes 5 % longer; None where
    # nothing moves or no slowness in reach does that.
    network_slack: float | None

    @property
    def link_binds(self) -> bool:
        """Whether the link inside a node binds, and not the network between nodes."""
        return self.binding == "bandwidth" and self.twice_link > self.twice_network


def limits_of(search: Search, cluster: ClusterSpec, found: Found, winner: Candidate) -> Limits:
    """Relax each constraint in turn, plan again, and compare with the fastest that fits today.

    `cluster` is the one of the search, or the same with another network.
    """
    problem, units = search.problem._replace(cluster=cluster), search.units
    today, roomier = found.fastest(), found.fastest(memory=WITH_MORE_MEMORY)
    assert today is not None, "the winner fits"
    more_memory = roomier.tokens_per_s / today.tokens_per_s - 1 if roomier else 0.0
    moves = winner.strategy.devices > 1
    twice = twice_link = 0.0
    if moves:
        ratio = 2.0 * _way(cluster) / _way(search.problem.cluster)
        twice = _gain(search.on_networks(np.asarray([ratio]))[0], today)
    if cluster.nodes > 1 and cluster.devices_per_node > 1:
        twice_link = _gain(_with_twice_the_link(search, cluster), today)
    slack = _network_slack(problem, units, winner) if moves else None
    if max(twice, twice_link) >= max(MIN_GAIN, more_memory):
        binding: Bottleneck = "bandwidth"
    else:
        binding = "memory" if more_memory >= MIN_GAIN else "compute"
    return Limits(
        binding=binding,
        twice_network=max(twice, 0.0),
        twice_link=max(twice_link, 0.0),
        more_memory=max(more_memory, 0.0),
        with_memory=roomier,
        free_bytes=found.limit_bytes - winner.needed_bytes,
        network_slack=slack,
    )


def _gain(found: Found, today: Candidate) -> float:
    faster = found.fastest()
    return faster.tokens_per_s / today.tokens_per_s - 1 if faster else 0.0


def _with_twice_the_link(search: Search, cluster: ClusterSpec) -> Found:
    if cluster == search.problem.cluster:
        return search.on_networks(np.asarray([2.0]), "link_bandwidth")[0]
    return search.retimed(scaled_link(cluster, 2.0))


def _way(cluster: ClusterSpec) -> float:
    """Bandwidth of the slowest way between devices."""
    return cluster.network or 0.0 if cluster.nodes > 1 else cluster.device.link_bandwidth


def _network_slack(problem: Problem, units: Units, winner: Candidate) -> float | None:
    """How many times slower the network may be, to two percent."""
    strategy = winner.strategy
    slower = np.cumprod(np.full(350, 1.02))
    priced = steps(units.of(strategy), Configurations.of([strategy]), problem)
    found = times(priced, problem.cluster, strategy.param_dtype, networks=1 / slower)
    longer = found.step_s[:, 0] > winner.step_s * (1 + SLOWDOWN_THRESHOLD)
    return float(slower[longer.argmax()]) if longer.any() else None


def link_crossover(search: Search, winner: Candidate) -> Crossover | None:
    """The bandwidth inside a node below which other degrees would be chosen, if there is one."""
    powers = np.arange(1, 4 * MOST_DOUBLINGS + 1) / 4
    factors = _two_to(-powers)
    for factor, there in zip(factors, search.on_networks(factors, "link_bandwidth"), strict=True):
        best = there.best()
        if best is not None and Degrees.of(best.strategy) != Degrees.of(winner.strategy):
            return Crossover(float(factor), best)
    return None


# Two to the power of k / 32. Multiplied, not raised: math libraries differ in the last bit, and
# answers are equal on every machine, also in a browser.
_ROOTS = np.cumprod([1.0, *(31 * [math.sqrt(math.sqrt(math.sqrt(math.sqrt(math.sqrt(2.0)))))])])


def _two_to(powers: Floats | float) -> Floats:
    """Two to powers that are multiples of 1/32."""
    whole = np.floor(powers)
    parts = np.rint((powers - whole) * 32).astype(np.int64)
    found: Floats = np.ldexp(_ROOTS[parts], whole.astype(np.int64))
    return found


class Crossover(NamedTuple):
    """A network, as a multiple of today's, and what would be chosen there."""

    factor: float
    choice: Candidate


def crossover(search: Search, winner: Candidate) -> Crossover | None:
    """Where the choice between all devices and groups of them changes; None where it does not.

    Slower networks ask for groups and faster ones for all devices, but the slowest may ask for
    yet another way; so the nearest change is looked for step by step.
    """
    cluster = search.problem.cluster
    direction = 1 if winner.strategy.hybrid else -1

    def first(powers: Floats) -> int | None:
        """The first of these powers of two at which the choice is the other one."""
        for index, there in enumerate(search.on_networks(_two_to(direction * powers))):
            best = there.best()
            if best is not None and best.strategy.hybrid != winner.strategy.hybrid:
                return index
        return None

    coarse = first(np.arange(1, 2 * MOST_DOUBLINGS + 1) / 2)
    if coarse is None:
        return None
    fine = coarse / 2 + np.arange(1, 17) / 32
    nearest = first(fine)
    assert nearest is not None, "the last of them is the one found before"
    high = float(fine[nearest])
    # Contenders keep the batches that suit today's network: confirm with all rows.
    beyond = scaled_network(cluster, float(_two_to(direction * (high + CONFIRMED_BEYOND))))
    there = search.retimed(beyond).best()
    if there is None or there.strategy.hybrid == winner.strategy.hybrid:
        return None
    return Crossover(float(_two_to(direction * high)), there)
