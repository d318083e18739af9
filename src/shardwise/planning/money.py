"""What training costs: time and money for so many tokens, and the cheapest number of devices."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.planning.problem import Problem
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.record import SpecError

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
    """The cluster and its halves, down to one device, the smallest first."""
    found = [cluster]
    nodes = cluster.nodes
    while nodes % 2 == 0:
        nodes //= 2
        found.append(cluster.but(nodes=nodes))
    devices = cluster.devices_per_node
    while nodes == 1 and devices % 2 == 0:
        devices //= 2
        found.append(cluster.but(nodes=1, devices_per_node=devices))
    return found[::-1]


def cheapest(problem: Problem, budget: Budget) -> tuple[ClusterSpec, Candidate] | None:
    """The part of the cluster that trains a token for the least, in time for the deadline."""
    quick = Space(prefetch=(1,), forward_prefetch=(0,), blocks_per_unit=(1,))
    best: tuple[float, ClusterSpec, Candidate] | None = None
    for cluster in smaller_clusters(problem.cluster):
        try:
            found = Search(problem._replace(cluster=cluster), quick).run().best()
        except SpecError:  # a global batch too small for so many devices
            continue
        if found is None or not budget.in_time(found.tokens_per_s):
            continue
        cost = cluster.devices / found.tokens_per_s
        # A tenth of a percent is no reason to take more devices.
        if best is None or cost < best[0] * 0.999:
            best = (cost, cluster, found)
    return None if best is None else (best[1], best[2])
