"""What another network, memory, device, size or length would change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shardwise.planning.limits import first_true, limits_of
from shardwise.planning.plan import check
from shardwise.planning.price import mfu_of, price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Found, Search
from shardwise.planning.space import Space
from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import EXPOSED_SHARE, verdict
from shardwise.predict.work import predict_work
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
from shardwise.spec.strategy import Strategy, show_recompute
from shardwise.step import Bottleneck

# A comparison of hardware can do without the second pass.
QUICK = Space().quick()


class Point(NamedTuple):
    """One value of what is varied, and the best there; nothing where nothing fits."""

    value: str
    problem: Problem
    candidate: Candidate | None
    mfu: float | None
    binding: Bottleneck
    # Why there is no answer, where it is not memory.
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        if self.candidate is None:
            return {"value": self.value, "fits": False}
        told = {"value": self.value, "fits": True, "mfu": self.mfu, "binding": self.binding}
        return {**told, **self.candidate.to_dict()}


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
    if cluster.nodes == 1:
        # One machine may be given more devices, as many as its kind has.
        per_node = max(per_node, cluster.device.node_size)
    if devices <= per_node:
        return cluster.but(nodes=1, devices_per_node=devices)
    if devices % per_node:
        raise SpecError(f"devices: {devices:,} do not fill nodes of {per_node}")
    if cluster.network is None:
        raise SpecError(
            f"devices: more than {per_node} need several nodes and a network between them; add "
            "it to the cluster, such as @400Gbps"
        )
    return cluster.but(nodes=devices // per_node, devices_per_node=per_node)


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
    return Point(value, problem, best, mfu_of(problem, units, best), limits.binding)


def _fixed_point(problem: Problem, value: str, fixed: Strategy) -> Point:
    cluster = problem.cluster
    strategy = fixed
    if strategy.devices != cluster.devices:
        strategy = fixed.unplaced().resolve(cluster.devices, cluster.devices_per_node)
    strategy = problem.job.split(strategy)
    units = Units(problem)
    candidate = price_one(problem, units, strategy)
    pooled = round(candidate.needed_bytes - candidate.peak_bytes)
    if verdict(round(candidate.peak_bytes), cluster.device, pooled) == "does not fit":
        return Point(value, problem, None, None, "memory")
    waits = candidate.exposed_s > EXPOSED_SHARE * candidate.step_s
    binding: Bottleneck = "bandwidth" if waits else "compute"
    return Point(value, problem, candidate, mfu_of(problem, units, candidate), binding)


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
    found: list[Point] = []
    refused: list[SpecError] = []
    for text in values:
        try:
            found.append(points.at(text))
        except SpecError as error:
            refused.append(error)
            found.append(Point(text, problem, None, None, "memory", error.problems[0]))
    # One value that cannot be is told in its row; if none can, it is an error.
    if refused and len(refused) == len(found):
        raise refused[0]
    return found


def changes(before: Point, after: Point) -> str:
    """What made the difference between two points, in a sentence."""
    one, other = before.candidate, after.candidate
    if one is None or other is None:
        if one is other:
            return ""
        return "it begins to fit." if one is None else "it no longer fits."
    assert before.mfu is not None
    assert after.mfu is not None
    points = (after.mfu - before.mfu) * 100
    head = f"{_pace(other.tokens_per_s / one.tokens_per_s)}, MFU {points:+.1f} points"
    parts = _mechanisms(before, one, after, other, better=points > 0)
    return f"{head}: {', '.join(parts)}." if parts and abs(points) >= 0.05 else f"{head}."


def _pace(ratio: float) -> str:
    if ratio >= 2:
        return f"{ratio:.1f}x as fast"
    if abs(ratio - 1) < 0.005:
        return "as fast"
    return f"{abs(ratio - 1):.0%} {'faster' if ratio > 1 else 'slower'}"


def _mechanisms(
    before: Point, one: Candidate, after: Point, other: Candidate, better: bool
) -> list[str]:
    """What changed; of what helps or hurts, only what goes the way the whole went."""
    parts = []
    again = [_recomputed(point, c) for point, c in ((before, one), (after, other))]
    was, now = one.strategy, other.strategy
    if was.recompute != now.recompute and (again[1] < again[0]) == better:
        more = "less" if again[1] < again[0] else "more"
        shown = f"{show_recompute(was.recompute)} to {show_recompute(now.recompute)}"
        parts.append(f"{more} recomputation ({shown})")
    if str(was) != str(now):
        parts.append(f"{was} becomes {now}")
    if was.micro_batch != now.micro_batch:
        parts.append(f"micro-batch {was.micro_batch} to {now.micro_batch}")
    waits = [c.exposed_s / c.step_s for c in (one, other)]
    if abs(waits[0] - waits[1]) >= 0.005 and (waits[1] < waits[0]) == better:
        parts.append(f"waiting for the network {waits[0]:.0%} to {waits[1]:.0%} of the step")
    each = [
        c.compute_s / point.problem.job.tokens_per_step(c.strategy)
        for point, c in ((before, one), (after, other))
    ]
    same = was.recompute == now.recompute and was.micro_batch == now.micro_batch
    devices = [point.problem.cluster.device for point in (before, after)]
    if devices[0].name != devices[1].name:
        peaks = [device.peak_flops(was.param_dtype) or 0.0 for device in devices]
        if peaks[0] and peaks[1]:
            parts.append(f"a peak {peaks[1] / peaks[0]:.1f}x as high")
    elif same and abs(each[1] / each[0] - 1) >= 0.005 and (each[1] < each[0]) == better:
        less = "less" if each[1] < each[0] else "more"
        parts.append(f"compute {less} slowed by communication beside it")
    return parts


def _recomputed(point: Point, candidate: Candidate) -> float:
    """FLOPs done again per FLOP of the model."""
    units = Units(point.problem).of(candidate.strategy)
    work = predict_work(units, Configurations.of([candidate.strategy]))
    return float(work.hardware_flops[0] / work.model_flops[0]) - 1


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
            share = float(value.rstrip("%"))
            share /= 100 if value.endswith("%") or share > 1 else 1
            if 0 < share <= 1:
                return Target(name, share)
        elif name == "step":
            milli = value.endswith("ms")
            seconds = float(value.removesuffix("ms").removesuffix("s")) / (1000 if milli else 1)
            if 0 < seconds < float("inf"):
                return Target(name, seconds)
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
    scales = {"network": (1.0, 6400.0, "Gbps"), "memory": (4.0, 2048.0, "GiB")}
    ladders = {"devices": _ladder_devices, "global-batch": _ladder_batch}
    points, tried = Points(problem, name, fixed), []

    def look(text: str) -> bool:
        try:
            tried.append(points.at(text))
        except SpecError:
            return False
        return target.met(tried[-1])

    if name in scales:
        low, high, unit = scales[name]
        value = first_true(lambda number: look(f"{number:.4g}{unit}"), low, high)
        found = None if value is None else f"{value:.4g}{unit}"
    elif name in ladders:
        found = _climb(look, *ladders[name](problem))
    else:
        known = (*scales, *ladders)
        hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        raise SpecError(f"least: unknown quantity {name[:40]!r}{hint}")
    return Solved(name, target, None if found is None else points.at(found), tried)


def _climb(look: Callable[[str], bool], unit: int, rungs: Iterable[int]) -> str | None:
    """The first rung that is enough, then the least multiple of `unit` between it and the last."""
    low = 0
    for rung in rungs:
        if look(str(rung)):
            high = rung
            break
        low = rung
    else:
        return None
    while high - low > max(unit, high // 50):
        middle = (low + high) // 2 // unit * unit
        if middle in (low, high) or not middle:
            break
        low, high = (low, middle) if look(str(middle)) else (middle, high)
    return str(high)


def _ladder_devices(problem: Problem) -> tuple[int, Iterable[int]]:
    return problem.cluster.devices_per_node, [2**power for power in range(18)]


def _ladder_batch(problem: Problem) -> tuple[int, Iterable[int]]:
    tokens = problem.job.seq_len * problem.cluster.devices
    return tokens, [tokens * 2**power for power in range(11)]
