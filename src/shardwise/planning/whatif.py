"""What another network, memory, device, size or length would change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shardwise.planning.explain import show_recompute
from shardwise.planning.limits import limits_of
from shardwise.planning.plan import check
from shardwise.planning.price import price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Found, Search
from shardwise.planning.space import Space
from shardwise.predict.estimate import verdict
from shardwise.spec import catalogue
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import (
    QuantityError,
    parse_bytes,
    parse_count,
    parse_rate,
    show_count,
    show_gib,
    write_rate,
)
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.strategy import Strategy
from shardwise.step import Bottleneck

# The second pass of a search brings a few percent; a comparison of hardware can do without.
QUICK = Space(prefetch=(1,), forward_prefetch=(0,), blocks_per_unit=(1,))


class Point(NamedTuple):
    """One value of what is varied, and the best there; nothing where nothing fits."""

    value: str
    problem: Problem
    candidate: Candidate | None
    mfu: float | None
    binding: Bottleneck


# ---- what can be varied ---------------------------------------------------------------------


def _network(problem: Problem, text: str) -> tuple[Problem, str]:
    rate = parse_rate(text if not text.replace(".", "").isdigit() else f"{text}Gbps")
    if problem.cluster.nodes == 1:
        raise SpecError("network: one node has none; vary it on a cluster of several")
    return _with_cluster(problem, network=rate), write_rate(rate)


def _memory(problem: Problem, text: str) -> tuple[Problem, str]:
    size = parse_bytes(text if not text.replace(".", "").isdigit() else f"{text}GiB")
    device = problem.cluster.device.but(memory=size, usable_memory=None)
    return _with_cluster(problem, device=device), show_gib(size)


def _device(problem: Problem, text: str) -> tuple[Problem, str]:
    device = catalogue.find_device(text)
    return _with_cluster(problem, device=device), device.name


def _devices(problem: Problem, text: str) -> tuple[Problem, str]:
    cluster = sized(problem.cluster, parse_count(text))
    return problem._replace(cluster=cluster), f"{cluster.devices:,}"


def _seq_len(problem: Problem, text: str) -> tuple[Problem, str]:
    job = problem.job.but(seq_len=parse_count(text))
    return problem._replace(job=job), f"{job.seq_len:,}"


def _global_batch(problem: Problem, text: str) -> tuple[Problem, str]:
    job = problem.job.but(global_batch=parse_count(text))
    return problem._replace(job=job), show_count(job.global_batch or 0)


VARIABLES: dict[str, Callable[[Problem, str], tuple[Problem, str]]] = {
    "network": _network,
    "memory": _memory,
    "device": _device,
    "devices": _devices,
    "seq-len": _seq_len,
    "global-batch": _global_batch,
}


def _with_cluster(problem: Problem, **changes: Any) -> Problem:
    return problem._replace(cluster=problem.cluster.but(**changes))


def sized(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """The same kind of cluster with another number of devices, in whole nodes."""
    per_node = cluster.devices_per_node
    if devices < 1:
        raise SpecError("devices: must be at least 1")
    if devices <= per_node:
        return cluster.but(nodes=1, devices_per_node=devices)
    if devices % per_node:
        raise SpecError(f"devices: {devices:,} do not fill nodes of {per_node}")
    if cluster.network is None:
        raise SpecError("devices: more than one node needs a network; add it, such as @400Gbps")
    return cluster.but(nodes=devices // per_node)


def varied(problem: Problem, name: str, text: str) -> tuple[Problem, str]:
    """The problem with one thing changed, and the value as people read it."""
    if name not in VARIABLES:
        hint = did_you_mean(name, VARIABLES) or f"; known are {', '.join(VARIABLES)}"
        raise SpecError(f"vary: unknown quantity {name[:40]!r}{hint}")
    try:
        return VARIABLES[name](problem, text)
    except QuantityError as error:
        raise SpecError(f"vary: {name}: {error}") from None


# ---- the best at a point --------------------------------------------------------------------


def point(problem: Problem, value: str, fixed: Strategy | None = None) -> Point:
    """Plan anew at a point, or price a fixed strategy there."""
    check(problem)
    if fixed is not None:
        return _fixed_point(problem, value, fixed)
    search = Search(problem, QUICK)
    found = search.run()
    return _best_point(problem, value, search.units, found)


def _best_point(problem: Problem, value: str, units: Units, found: Found) -> Point:
    best = found.best()
    if best is None:
        return Point(value, problem, None, None, "memory")
    limits = limits_of(problem, units, found, best)
    return Point(value, problem, best, mfu(problem, units, best), limits.binding)


def _fixed_point(problem: Problem, value: str, fixed: Strategy) -> Point:
    cluster = problem.cluster
    strategy = fixed
    if strategy.devices != cluster.devices:
        # The same kind on another number of devices; groups keep their size.
        strategy = fixed.but(shard=fixed.shard if fixed.hybrid else None, replicate=None).resolve(
            cluster.devices, cluster.devices_per_node
        )
    strategy = problem.job.split(strategy)
    units = Units(problem)
    candidate = price_one(problem, units, strategy)
    if verdict(round(candidate.peak_bytes), cluster.device) == "does not fit":
        return Point(value, problem, None, None, "memory")
    waits = candidate.exposed_s > 0.15 * candidate.step_s
    binding: Bottleneck = "bandwidth" if waits else "compute"
    return Point(value, problem, candidate, mfu(problem, units, candidate), binding)


def mfu(problem: Problem, units: Units, candidate: Candidate) -> float:
    cluster, strategy = problem.cluster, candidate.strategy
    peak = cluster.device.peak_flops(strategy.param_dtype)
    assert peak is not None
    per_token = 3.0 * units.of(strategy).forward_flops()
    return candidate.tokens_per_s * per_token / (peak * cluster.devices)


class Points:
    """Points of one problem as one thing varies. Another network needs no other search: what fits
    stays, and only times change.
    """

    def __init__(self, problem: Problem, name: str, fixed: Strategy | None) -> None:
        self.problem, self.name, self.fixed = problem, name, fixed
        self._search: Search | None = None

    def at(self, text: str) -> Point:
        changed, value = varied(self.problem, self.name, text)
        if self.name != "network" or self.fixed is not None:
            return point(changed, value, self.fixed)
        check(changed)
        if self._search is None:
            self._search = Search(changed, QUICK)
            self._search.run()
        found = self._search.retimed(changed.cluster)
        return _best_point(changed, value, self._search.units, found)


def study(
    problem: Problem, name: str, values: Iterable[str], fixed: Strategy | None = None
) -> list[Point]:
    """A point for each value."""
    points = Points(problem, name, fixed)
    return [points.at(text) for text in values]


def changes(before: Point, after: Point) -> str:
    """What made the difference between two points, in a sentence."""
    if before.candidate is None or after.candidate is None:
        if before.candidate is after.candidate:
            return ""
        return "It begins to fit." if before.candidate is None else "It no longer fits."
    assert before.mfu is not None
    assert after.mfu is not None
    one, other = before.candidate.strategy, after.candidate.strategy
    points = (after.mfu - before.mfu) * 100
    parts = []
    if one.recompute != other.recompute:
        less = other.full_recompute_share < one.full_recompute_share or other.recompute == "none"
        was, now = show_recompute(one.recompute), show_recompute(other.recompute)
        parts.append(f"{'less' if less else 'more'} recomputation ({was} to {now})")
    if str(one) != str(other):
        parts.append(f"{one} becomes {other}")
    if one.micro_batch != other.micro_batch:
        parts.append(f"micro-batch {one.micro_batch} to {other.micro_batch}")
    shares = [p.candidate.exposed_s / p.candidate.step_s for p in (before, after) if p.candidate]
    if abs(shares[0] - shares[1]) >= 0.005:
        parts.append(f"waiting for the network {shares[0]:.0%} to {shares[1]:.0%} of the step")
    each = [
        p.candidate.compute_s / p.problem.job.tokens_per_step(p.candidate.strategy)
        for p in (before, after)
        if p.candidate
    ]
    same = one.recompute == other.recompute and one.micro_batch == other.micro_batch
    same_device = before.problem.cluster.device.name == after.problem.cluster.device.name
    if same and same_device and abs(each[1] / each[0] - 1) >= 0.005:
        slower = "less" if each[1] < each[0] else "more"
        parts.append(f"compute {slower} slowed by communication beside it")
    because = f": {', '.join(parts)}" if parts else ""
    return f"MFU {points:+.1f} points{because}."


# ---- thresholds -----------------------------------------------------------------------------


class Target(NamedTuple):
    """What a threshold is asked for."""

    quantity: str
    value: float

    def met(self, point: Point) -> bool:
        candidate = point.candidate
        if candidate is None:
            return False
        if self.quantity == "mfu":
            return (point.mfu or 0.0) >= self.value
        if self.quantity == "step":
            return candidate.step_s <= self.value
        return candidate.exposed_s <= self.value * candidate.step_s

    def __str__(self) -> str:
        if self.quantity == "step":
            return f"a step of {self.value:g} s"
        if self.quantity == "mfu":
            return f"an MFU of {self.value:.0%}"
        return f"at most {self.value:.1%} of the step waiting for the network"


def parse_target(text: str) -> Target:
    """`mfu=45%`, `step=10s`, or `exposed=1%`."""
    name, _, value = text.partition("=")
    try:
        if name in ("mfu", "exposed"):
            share = float(value.rstrip("%")) / (100 if value.endswith("%") else 1)
            if 0 < share <= 1:
                return Target(name, share)
        elif name == "step" and float(value.rstrip("s")) > 0:
            return Target(name, float(value.rstrip("s")))
    except ValueError:
        pass
    raise SpecError(f"for: cannot read {text[:40]!r}; write mfu=45%, step=10s or exposed=1%")


class Solved(NamedTuple):
    """The least value that meets a target, with the points that were looked at."""

    name: str
    target: Target
    point: Point | None
    tried: list[Point]


def least(problem: Problem, name: str, target: Target, fixed: Strategy | None = None) -> Solved:
    """The least network, memory, batch or number of devices for a target."""
    scales = {"network": _scan_network, "memory": _scan_memory}
    ladders = {"devices": _ladder_devices, "global-batch": _ladder_batch}
    points, tried = Points(problem, name, fixed), []

    def look(text: str) -> bool:
        try:
            tried.append(points.at(text))
        except SpecError:
            return False
        return target.met(tried[-1])

    if name in scales:
        low, high, show = scales[name](problem)
        found = _bisect(look, low, high, show)
    elif name in ladders:
        found = next((text for text in ladders[name](problem) if look(text)), None)
    else:
        known = (*scales, *ladders)
        hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        raise SpecError(f"least: unknown quantity {name[:40]!r}{hint}")
    return Solved(name, target, None if found is None else points.at(found), tried)


def _scan_network(problem: Problem) -> tuple[float, float, Callable[[float], str]]:
    return 1.0, 6400.0, lambda value: f"{value:.4g}Gbps"


def _scan_memory(problem: Problem) -> tuple[float, float, Callable[[float], str]]:
    return 4.0, 2048.0, lambda value: f"{value:.4g}GiB"


def _bisect(
    look: Callable[[str], bool], low: float, high: float, show: Callable[[float], str]
) -> str | None:
    """To two percent, on a scale of ratios."""
    if look(show(low)):
        return show(low)
    if not look(show(high)):
        return None
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if look(show(middle)) else (middle, high)
    return show(high)


def _ladder_devices(problem: Problem) -> Iterable[str]:
    count = 1
    while count <= 2**17:
        yield str(count)
        count *= 2


def _ladder_batch(problem: Problem) -> Iterable[str]:
    tokens = problem.job.seq_len * problem.cluster.devices
    for factor in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024):
        yield str(tokens * factor)
