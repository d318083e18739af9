"""What-if studies: the best configuration for each value of one quantity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from shardwise.planning.accumulated import with_accumulation
from shardwise.planning.choice import SearchResult
from shardwise.planning.limits import limits_of
from shardwise.planning.make import check_predictable
from shardwise.planning.money import Budget
from shardwise.planning.price import mfu_of, price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.planning.vary import with_quantity
from shardwise.predict.estimate import EXPOSED_SHARE, optimizer_dominates, verdict
from shardwise.predict.intervals import Regime, error_interval, is_fitted, regime_of
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import Bottleneck

# Prefetch and blocks per unit affect all points in the same way, so studies do not vary them.
QUICK_SPACE = Space().quick()


class Point(NamedTuple):
    """One value of the varied quantity, and its best configuration; None if none fits."""

    value: str
    problem: Problem
    candidate: Candidate | None
    mfu: float | None
    binding: Bottleneck
    # Why this value is not possible; empty if it is possible.
    refused: str = ""
    # Whether the binding bandwidth is that of the link inside a node.
    link_binds: bool = False
    regime: Regime = "dense"

    @property
    def fitted(self) -> bool:
        """Whether step times were fitted to runs on such devices, or calibrated on the cluster."""
        return is_fitted(self.problem.cluster)

    @property
    def error_interval(self) -> tuple[float, float]:
        """Relative error (low, high) of the predicted speed, in nine of ten runs."""
        return error_interval(self.problem.cluster, self.regime)

    @property
    def step_s_interval(self) -> tuple[float, float] | None:
        """Seconds (low, high) between which nine of ten measured steps are; None if none fits."""
        if self.candidate is None:
            return None
        low, high = self.error_interval
        return self.candidate.step_s * (1 + low), self.candidate.step_s * (1 + high)

    def to_dict(self, budget: Budget | None = None) -> dict[str, Any]:
        """The point as `--json` prints it, with its cost if a budget is given."""
        if self.candidate is None:
            refused = {"refused": self.refused} if self.refused else {}
            return {"value": self.value, "fits": False, **refused}
        cluster = self.problem.cluster
        speed = self.candidate.tokens_per_s
        cost = (
            {"cost": budget._replace(regime=self.regime).cost(speed, cluster).to_dict()}
            if budget and budget.given
            else {}
        )
        late = budget is not None and budget.deadline_s is not None
        return {
            "value": self.value,
            "fits": True,
            "cluster": str(cluster),
            "devices": cluster.devices,
            "mfu": self.mfu,
            "binding": self.binding,
            "fitted": self.fitted,
            "step_s_interval": list(self.step_s_interval or ()),
            **self.candidate.to_dict(),
            **cost,
            **({"in_time": budget.in_time(speed)} if budget and late else {}),
        }


def predict_point(
    problem: Problem, value: str, fixed: Strategy | None = None, space: Space = QUICK_SPACE
) -> Point:
    """Predict a point: the best configuration of a problem, or a fixed strategy on its cluster.

    `value` is the varied quantity's value, as screens show it.
    """
    check_predictable(problem)
    if fixed is not None:
        return _fixed_point(problem, value, fixed)
    search = Search(problem, space)
    search, found = with_accumulation(search, search.run())
    return _best_point(problem, value, search, found)


def _best_point(problem: Problem, value: str, search: Search, found: SearchResult) -> Point:
    """The point with the recommended configuration of a search."""
    best = found.best()
    if best is None:
        return Point(value, problem, None, None, "memory")
    limits = limits_of(search, problem.cluster, found, best)
    mfu = mfu_of(problem, search.units, best)
    regime = regime_of(search.units.of(problem.base))
    return Point(
        value, problem, best, mfu, limits.binding, link_binds=limits.link_binds, regime=regime
    )


def _fixed_point(problem: Problem, value: str, fixed: Strategy) -> Point:
    """The point of a fixed strategy, adapted to the cluster's number of devices."""
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
    if optimizer_dominates(candidate.compute_s, candidate.exposed_s, candidate.optimizer_s):
        binding = "optimizer"
    mfu, regime = mfu_of(problem, units, candidate), regime_of(units.of(problem.base))
    return Point(value, problem, candidate, mfu, binding, regime=regime)


class Points:
    """Points of one problem for values of one quantity.

    All networks share one search: memory stays the same, and only times are predicted again.
    """

    def __init__(self, problem: Problem, name: str, fixed: Strategy | None) -> None:
        self.problem, self.name, self.fixed = problem, name, fixed
        self._search: Search | None = None

    def at(self, text: str) -> Point:
        """The point at a value; raises SpecError if the value is not possible."""
        changed, value = with_quantity(self.problem, self.name, text)
        if self.name != "network" or self.fixed is not None:
            return predict_point(changed, value, self.fixed)
        check_predictable(changed)
        if self._search is None:
            search = Search(changed, QUICK_SPACE)
            self._search, _ = with_accumulation(search, search.run())
        found = self._search.retimed(changed.cluster)
        return _best_point(changed, value, self._search, found)


def study(
    problem: Problem, name: str, values: Iterable[str], fixed: Strategy | None = None
) -> list[Point]:
    """A point for each value; an impossible value gives a point with `refused` set.

    Raises SpecError if no value is possible.
    """
    points = Points(problem, name, fixed)
    found: list[Point] = []
    errors: list[SpecError] = []
    for text in values:
        try:
            found.append(points.at(text))
        except SpecError as error:
            errors.append(error)
            found.append(Point(text, problem, None, None, "memory", error.problems[0]))
    if errors and len(errors) == len(found):
        raise errors[0]
    return found
