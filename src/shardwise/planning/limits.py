"""What limits a configuration, and the slack in memory and network."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shardwise.planning.choice import VISIBLE, SearchResult
from shardwise.planning.layout import Degrees
from shardwise.planning.price import price_one, scaled_network
from shardwise.planning.problem import BandwidthField, Problem, Units, steps, times
from shardwise.planning.rows import Candidate
from shardwise.planning.search import WITH_MORE_MEMORY, Search
from shardwise.predict.configurations import Configurations, Floats
from shardwise.predict.estimate import optimizer_dominates
from shardwise.spec.cluster import ClusterSpec
from shardwise.step.profile import Bottleneck

# A step longer by this share counts as slower.
SLOWDOWN_THRESHOLD = 0.05
# A constraint whose relaxation gains less than this share does not limit a run.
MIN_GAIN = 0.03
# Where the optimizer limits a run, the gain from this many times the accumulation is shown.
LARGER_BATCH = 4
# Crossovers are searched up to this many doublings of the bandwidth away: four times.
MOST_DOUBLINGS = 2

# A crossover has to hold for all rows this many doublings beyond it.
CONFIRMED_BEYOND = 5 / 32


class Limits(NamedTuple):
    """The binding constraint of a configuration, gains from relaxing each, and slack."""

    binding: Bottleneck
    # Relative gains in tokens/s of the configuration itself, from twice a bandwidth.
    twice_network: float
    # Of the link inside a node, where a network connects several.
    twice_link: float
    # The choice with twice the network, if another configuration gains clearly more; else None.
    with_network: Candidate | None
    # Relative gain of the fastest configuration with a quarter more memory, and that configuration.
    more_memory: float
    with_memory: Candidate | None
    free_bytes: float
    # How many times slower the network could be before a step takes 5 % longer; None if a single
    # device, or if no slowdown that was tried has this effect.
    network_slack: float | None
    # The share of a step that would wait for communication without network latency.
    waiting_without_latency: float
    # Relative gain in tokens/s from LARGER_BATCH times the accumulation; None unless the optimizer
    # binds.
    larger_batch: float | None = None

    @property
    def link_binds(self) -> bool:
        """Whether the link inside a node binds, and not the network between nodes."""
        return self.binding == "bandwidth" and self.twice_link > self.twice_network


def limits_of(
    search: Search,
    cluster: ClusterSpec,
    found: SearchResult,
    winner: Candidate,
    plan_again: bool = True,
) -> Limits:
    """What limits the winner: relax bandwidth, latency and memory in turn, and compare the gains.

    `cluster` is the cluster of the search, or the same with another network. With `plan_again`, the
    choice with twice the network is searched too.
    """
    today, roomier = found.fastest(), found.fastest(memory=WITH_MORE_MEMORY)
    assert today is not None, "the winner fits"
    more_memory = roomier.tokens_per_s / today.tokens_per_s - 1 if roomier else 0.0
    own = _WinnerTimes(search.problem._replace(cluster=cluster), search.units, winner)
    twice = twice_link = waiting = 0.0
    planned = slack = None
    latency = False
    if winner.strategy.devices > 1:
        twice = own.gain(2.0)
        planned = _plan_on_twice_network(search, cluster, winner, twice) if plan_again else None
        slack = own.slack()
        latency, waiting = own.without_latency()
    if cluster.nodes > 1 and cluster.devices_per_node > 1:
        twice_link = own.gain(2.0, "link_bandwidth")
    larger = _larger_batch_gain(search, cluster, winner)
    if larger is not None:
        binding: Bottleneck = "optimizer"
    elif latency and more_memory < MIN_GAIN:
        binding = "latency"
    # Only gains of this configuration count, not what another layout would gain from bandwidth.
    elif max(twice, twice_link) >= max(MIN_GAIN, more_memory):
        binding = "bandwidth"
    else:
        binding = "memory" if more_memory >= MIN_GAIN else "compute"
    return Limits(
        binding=binding,
        twice_network=twice,
        twice_link=twice_link,
        with_network=planned,
        more_memory=max(more_memory, 0.0),
        with_memory=roomier,
        free_bytes=found.limit_bytes - winner.needed_bytes,
        network_slack=slack,
        waiting_without_latency=waiting,
        larger_batch=larger,
    )


def _larger_batch_gain(search: Search, cluster: ClusterSpec, winner: Candidate) -> float | None:
    """The gain from LARGER_BATCH times the accumulation, if the optimizer limits the winner."""
    if not optimizer_dominates(winner.compute_s, winner.exposed_s, winner.optimizer_s):
        return None
    steps = LARGER_BATCH * winner.strategy.accumulate
    larger = winner.strategy.but(accumulate=steps)
    priced = price_one(search.problem, search.units, larger, cluster)
    return priced.tokens_per_s / winner.tokens_per_s - 1


def _plan_on_twice_network(
    search: Search, cluster: ClusterSpec, winner: Candidate, own_gain: float
) -> Candidate | None:
    """The choice with twice the network; None if it is the winner or gains little more."""
    ratio = 2.0 * _slowest_bandwidth(cluster) / _slowest_bandwidth(search.problem.cluster)
    best = search.on_networks(np.asarray([ratio]))[0].best()
    if best is None or best.strategy == winner.strategy:
        return None
    gain = best.tokens_per_s / winner.tokens_per_s - 1
    return best if gain >= max(own_gain + VISIBLE, SLOWDOWN_THRESHOLD) else None


def _slowest_bandwidth(cluster: ClusterSpec) -> float:
    """Bytes per second of the slowest connection between devices: the network, or the link."""
    return cluster.network or 0.0 if cluster.nodes > 1 else cluster.device.link_bandwidth


class _WinnerTimes:
    """Step times of the winner itself on other networks, without a new search."""

    def __init__(self, problem: Problem, units: Units, winner: Candidate) -> None:
        strategy = winner.strategy
        self.cluster, self.winner = problem.cluster, winner
        self.priced = steps(units.of(strategy), Configurations.of([strategy]), problem)

    def _steps(self, networks: Floats, way: BandwidthField | None = None) -> Floats:
        """Seconds of the winner's step on networks these times as fast as the cluster's."""
        dtype = self.winner.strategy.param_dtype
        found: Floats = times(self.priced, self.cluster, dtype, networks, way).step_s[:, 0]
        return found

    def gain(self, factor: float, way: BandwidthField | None = None) -> float:
        """How much faster the winner's step is at `factor` times the bandwidth: 0.1 is 10 %.

        Never below 0. `way` names the bandwidth; None is the network's, or on a single node the
        link's.
        """
        return max(0.0, self.winner.step_s / float(self._steps(np.asarray([factor]), way)[0]) - 1)

    def slack(self) -> float | None:
        """How many times slower the network may be before a step takes 5 % longer, to two percent.

        None if no slowdown that was tried has this effect.
        """
        slower = np.cumprod(np.full(350, 1.02))
        longer = self._steps(1 / slower) > self.winner.step_s * (1 + SLOWDOWN_THRESHOLD)
        return float(slower[longer.argmax()]) if longer.any() else None

    def without_latency(self) -> tuple[bool, float]:
        """Whether latency causes most waiting; and the share of a step that waits without it."""
        waiting = self.winner.exposed_s
        if waiting < MIN_GAIN * self.winner.step_s:
            return False, waiting / self.winner.step_s
        dtype = self.winner.strategy.param_dtype
        found = times(self.priced, self.cluster, dtype, latency=False)
        left = float(found.exposed_communication_s[0])
        return left < waiting / 2, max(0.0, left) / float(found.step_s[0])


def link_crossover(search: Search, winner: Candidate) -> Crossover | None:
    """The bandwidth inside a node below which other degrees would be chosen; None if not found."""
    powers = np.arange(1, 4 * MOST_DOUBLINGS + 1) / 4
    factors = _power_of_two(-powers)
    for factor, there in zip(factors, search.on_networks(factors, "link_bandwidth"), strict=True):
        best = there.best()
        if best is not None and Degrees.of(best.strategy) != Degrees.of(winner.strategy):
            return Crossover(float(factor), best)
    return None


# Two to the power of k / 32, by square roots and products: math libraries differ in the last bit of
# a power, and answers must be equal on every machine, also in a browser.
_ROOTS_OF_TWO = np.cumprod(
    [1.0, *(31 * [math.sqrt(math.sqrt(math.sqrt(math.sqrt(math.sqrt(2.0)))))])]
)


def _power_of_two(powers: Floats | float) -> Floats:
    """Two to powers that are multiples of 1/32."""
    whole = np.floor(powers)
    parts = np.rint((powers - whole) * 32).astype(np.int64)
    found: Floats = np.ldexp(_ROOTS_OF_TWO[parts], whole.astype(np.int64))
    return found


class Crossover(NamedTuple):
    """A bandwidth, as a multiple of the cluster's, and the configuration chosen at it."""

    factor: float
    choice: Candidate


def crossover(search: Search, winner: Candidate) -> Crossover | None:
    """The network at which the choice changes between sharding over groups and over all devices.

    Slower networks favour groups and faster ones all devices, but very slow networks may favour
    something else. So the nearest change is searched step by step. None if there is none within
    MOST_DOUBLINGS.
    """
    cluster = search.problem.cluster
    direction = 1 if winner.strategy.hybrid else -1

    def first(powers: Floats) -> int | None:
        """Index of the first of these powers of two at which the choice changes; None if none."""
        for index, there in enumerate(search.on_networks(_power_of_two(direction * powers))):
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
    # Contenders have batches chosen for the cluster's network, so confirm with all rows.
    beyond = scaled_network(cluster, float(_power_of_two(direction * (high + CONFIRMED_BEYOND))))
    there = search.retimed(beyond).best()
    if there is None or there.strategy.hybrid == winner.strategy.hybrid:
        return None
    return Crossover(float(_power_of_two(direction * high)), there)
