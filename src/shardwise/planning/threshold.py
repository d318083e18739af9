"""Thresholds: the least network, memory, batch or number of devices that meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from shardwise.planning.money import DAY, Budget
from shardwise.planning.problem import Problem
from shardwise.planning.space import Space
from shardwise.planning.vary import node_size
from shardwise.planning.whatif import Point, Points, predict_point
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.strategy import Strategy

# The largest cluster that is searched.
MOST_DEVICES = 2**16
MOST_BATCH_DOUBLINGS = 10

Quantity = Literal["mfu", "step", "exposed", "days"]
Obstacle = Literal["no network", "network needed"]


class Target(NamedTuple):
    """The target: a share (mfu, exposed), or the most seconds of a step or of training `tokens`."""

    quantity: Quantity
    value: float
    tokens: float = 0.0

    def met(self, point: Point) -> bool:
        """Whether a point meets the target; false if no configuration fits."""
        candidate = point.candidate
        if candidate is None:
            return False
        if self.quantity == "mfu":
            return (point.mfu or 0.0) >= self.value
        if self.quantity == "step":
            return candidate.step_s <= self.value
        if self.quantity == "days":
            return self.tokens / candidate.tokens_per_s <= self.value
        return candidate.exposed_s <= self.value * candidate.step_s


def parse_target(text: str, tokens: float | None = None) -> Target:
    """Read a target: `mfu=45%`, `step=10s`, `exposed=1%`, or `days=30` to train on `tokens`."""
    name, _, value = text.partition("=")
    try:
        if name in ("mfu", "exposed"):
            share = float(value.rstrip("%"))
            share /= 100 if value.endswith("%") or share > 1 else 1
            if 0 < share <= 1:
                return Target("mfu" if name == "mfu" else "exposed", share)
        elif name == "step":
            milli = value.endswith("ms")
            seconds = float(value.removesuffix("ms").removesuffix("s")) / (1000 if milli else 1)
            if 0 < seconds < float("inf"):
                return Target("step", seconds)
        elif name == "days" and 0 < float(value) < 1e6:
            if tokens is None:
                raise SpecError("for: days needs --tokens, such as --tokens 1T")
            return Target("days", float(value) * DAY, tokens)
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
    raise SpecError(
        f"for: cannot read {text[:40]!r}; write mfu=45%, step=10s, exposed=1% or days=30"
    )


class Threshold(NamedTuple):
    """The least value of a quantity that meets a target; `answer` is None if no value does."""

    name: str
    target: Target
    answer: Point | None
    # Every point that was planned, in order.
    tried: list[Point]
    # What stopped the search, other than the target; None if nothing did.
    obstacle: Obstacle | None = None

    @property
    def met(self) -> bool:
        """Whether the target is met; if there is no network to vary, by the cluster as it is."""
        return self.answer is not None or (
            self.obstacle == "no network" and self.target.met(self.tried[0])
        )

    @property
    def best(self) -> Point | None:
        """The fastest point that was planned; None if no configuration fits at any."""
        fitting = [point for point in self.tried if point.candidate]
        return max(fitting, key=_throughput, default=None)

    def to_dict(self, budget: Budget) -> dict[str, Any]:
        """The threshold as `--json` prints it."""
        best = self.best
        return {
            "quantity": self.name,
            "target": self.target._asdict() | {"tokens": self.target.tokens or None},
            "met": self.met,
            "answer": self.answer.to_dict(budget) if self.answer else None,
            "best": best.to_dict(budget) if best else None,
            "obstacle": self.obstacle,
        }


def _throughput(point: Point) -> float:
    """Tokens per second at a point; 0 if no configuration fits."""
    return point.candidate.tokens_per_s if point.candidate else 0.0


def find_threshold(
    problem: Problem, name: str, target: Target, fixed: Strategy | None = None, above: int = 0
) -> Threshold:
    """The least network, memory, batch or number of devices for a target.

    `fixed` is a strategy to use instead of a search. `above` is a number of devices or a batch that
    is known not to be enough.
    """
    scales = {"network": (1.0, 6400.0, "Gbps"), "memory": (4.0, 2048.0, "GiB")}
    ladders = {"devices": _device_rungs, "global-batch": _batch_rungs}
    if name not in (*scales, *ladders):
        known = (*scales, *ladders)
        hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        raise SpecError(f"least: unknown quantity {name[:40]!r}{hint}")
    cluster = problem.cluster
    if name == "network" and cluster.nodes == 1:
        # Searched like `plan` does, so that both show the same figure.
        here = predict_point(problem, str(cluster), fixed, Space())
        return Threshold(name, target, None, [here], "no network")
    points, tried = Points(problem, name, fixed), []

    def meets(text: str) -> bool:
        try:
            tried.append(points.at(text))
        except SpecError:
            return False
        return target.met(tried[-1])

    if name in scales:
        low, high, unit = scales[name]
        value = first_true(lambda number: meets(f"{number:.4g}{unit}"), low, high)
        found = None if value is None else f"{value:.4g}{unit}"
    else:
        found = _lowest_rung(meets, *ladders[name](problem), above)
    short = name == "devices" and cluster.nodes == 1 and cluster.network is None
    obstacle: Obstacle | None = "network needed" if short and found is None else None
    answer = None if found is None else points.at(found)
    return Threshold(name, target, answer, tried, obstacle)


def devices_for_deadline(problem: Problem, budget: Budget) -> Threshold | None:
    """The least number of devices, more than the cluster has, that meets the budget's deadline.

    None without a deadline.
    """
    if budget.tokens is None or budget.deadline_s is None:
        return None
    target = Target("days", budget.deadline_s, budget.tokens)
    return find_threshold(problem, "devices", target, above=problem.cluster.devices)


def _lowest_rung(
    meets: Callable[[str], bool], unit: int, rungs: Iterable[int], low: int
) -> str | None:
    """The least value above `low` for which `meets` holds, as text; None if no rung is enough.

    First the rungs upwards, then bisection below the first one that is enough: to a multiple of
    `unit`, or to 2 %.
    """
    for rung in rungs:
        if rung <= low:
            continue
        if meets(str(rung)):
            high = rung
            break
        low = rung
    else:
        return None
    while high - low > max(unit, high // 50):
        middle = (low + high) // 2 // unit * unit
        if middle in (low, high) or not middle:
            break
        low, high = (low, middle) if meets(str(middle)) else (middle, high)
    return str(high)


def _device_rungs(problem: Problem) -> tuple[int, Iterable[int]]:
    """Devices per node, and the numbers of devices to try: powers of two in a node, then nodes."""
    size, cluster = node_size(problem.cluster), problem.cluster
    within = [2**power for power in range(20) if 2**power < size]
    if cluster.nodes == 1 and cluster.network is None:
        return size, [*within, size]
    nodes = [2**power for power in range(20) if 2**power * size <= MOST_DEVICES]
    return size, [*within, *(count * size for count in nodes)]


def _batch_rungs(problem: Problem) -> tuple[int, Iterable[int]]:
    """Tokens of one sequence per device, and the batches to try: that, doubled repeatedly."""
    tokens = problem.job.seq_len * problem.cluster.devices
    return tokens, [tokens * 2**power for power in range(MOST_BATCH_DOUBLINGS + 1)]


def first_true(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """The least value between `low` and `high` from which on `holds` is true, to two percent.

    None if it is false at `high`; `low` if it is already true there.
    """
    if holds(low):
        return low
    if not holds(high):
        return None
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
