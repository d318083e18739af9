"""What training costs: time and money for so many tokens, and the cheapest number of devices."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.planning.problem import Problem
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.record import SpecError

# Costs nearer than this are the same.
SAME_COST = 0.02
HOUR = 3600.0
DAY = 24 * HOUR


class Budget(NamedTuple):
    """Tokens to train on, the price of a device-hour, and how long it may take; each optional."""

    tokens: float | None = None
    price: float | None = None
    deadline_s: float | None = None

    def seconds(self, tokens_per_s: float) -> float | None:
        return None if self.tokens is None else self.tokens / tokens_per_s

    def device_hours(self, tokens_per_s: float, devices: int) -> float:
        """For all tokens; for a billion where no number is given."""
        return (self.tokens or 1e9) / tokens_per_s * devices / HOUR

    def money(self, tokens_per_s: float, devices: int) -> float | None:
        hours = self.device_hours(tokens_per_s, devices)
        return None if self.price is None else hours * self.price

    def in_time(self, tokens_per_s: float) -> bool:
        seconds = self.seconds(tokens_per_s)
        return seconds is None or self.deadline_s is None or seconds <= self.deadline_s


def smaller_clusters(cluster: ClusterSpec) -> list[ClusterSpec]:
    """Parts of the cluster up to all of it: some of a node, then whole nodes."""
    steps = sorted({base * 2**power for base in (1, 3) for power in range(20)})
    parts = [
        cluster.but(nodes=1, devices_per_node=size)
        for size in steps
        if size < cluster.devices_per_node
    ]
    nodes = [count for count in steps if count < cluster.nodes]
    return [*parts, *(cluster.but(nodes=count) for count in nodes), cluster]


class Sized(NamedTuple):
    """The best on a part of the cluster."""

    cluster: ClusterSpec
    candidate: Candidate

    @property
    def cost(self) -> float:
        """Device-seconds of a token."""
        return self.cluster.devices / self.candidate.tokens_per_s


def by_size(problem: Problem) -> list[Sized]:
    """The best on each part of the cluster on which anything fits."""
    quick = Space().quick()
    found = []
    for cluster in smaller_clusters(problem.cluster):
        try:
            best = Search(problem._replace(cluster=cluster), quick).run().best()
        except SpecError:  # a global batch too small for so many devices
            continue
        if best is not None:
            found.append(Sized(cluster, best))
    return found


def cheapest(sizes: list[Sized], budget: Budget) -> Sized | None:
    """The part on which a token costs least, in time; of those that cost nearly as little, the
    largest, which is done first.
    """
    in_time = [size for size in sizes if budget.in_time(size.candidate.tokens_per_s)]
    if not in_time:
        return None
    least = min(size.cost for size in in_time)
    return [size for size in in_time if size.cost <= least * (1 + SAME_COST)][-1]
