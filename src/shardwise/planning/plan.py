"""A plan: the configuration to run, its rivals, and why."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from shardwise.notebook import html_of
from shardwise.planning.explain import limits_in_words, reasons
from shardwise.planning.limits import WORTH, Limits, limits_of
from shardwise.planning.money import Budget, Cost, SizeChoice, by_size, choose_size
from shardwise.planning.price import mfu_of, price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Found, Nearest, Search
from shardwise.planning.sequence import longest
from shardwise.planning.space import Space
from shardwise.predict.fit import Change, ways_to_fit
from shardwise.predict.time import coefficients_for, error_interval, hardware_of, is_fitted
from shardwise.spec.catalogue import coefficient
from shardwise.spec.quantity import show_gib
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy, show_recompute

Objective = Literal["throughput", "memory", "sequence", "money"]
# What the objective "memory" may give up in speed.
FAST_ENOUGH = 0.9


class Baseline(NamedTuple):
    """A configuration to compare with; no speed where it does not fit."""

    name: str
    strategy: Strategy
    needed_bytes: float
    candidate: Candidate | None


class Plan(NamedTuple):
    """The answer of `plan`. `winner` is None where nothing fits; then `ways` says what would."""

    problem: Problem
    units: Units
    objective: Objective
    # What the objective found before the search, in a sentence.
    aim: str
    budget: Budget
    # For money: the best on each part of the cluster, and which part was chosen.
    size_choice: SizeChoice | None
    winner: Candidate | None
    # The best of each layout, the fastest first.
    layouts: list[Candidate]
    baselines: list[Baseline]
    rejected: list[Nearest]
    front: list[Candidate]
    why: list[str]
    limits: Limits | None
    limits_why: list[str]
    tips: list[str]
    ways: list[Change]
    considered: int
    fitting: int
    limit_bytes: int
    # Of tokens/s; and whether it was fitted for this family of devices.
    interval: tuple[float, float]
    fitted: bool
    # Of the ratio of two configurations on one machine.
    comparison: tuple[float, float]

    def __repr__(self) -> str:
        best = repr(self.winner) if self.winner else "no configuration fits"
        question = f"{self.problem.model.name} on {self.problem.cluster}"
        return f"Plan({question}: {best}; {self.fitting:,} of {self.considered:,} fit)"

    def _repr_html_(self) -> str:
        return html_of(self)

    def indistinguishable(self) -> int:
        """How many layouts lie too near to the winner to be told from it."""
        if self.winner is None:
            return 0
        low, high = self.comparison
        speeds = [c.tokens_per_s / self.winner.tokens_per_s for c in self.layouts]
        return sum(1 for speed in speeds if 1 + low <= speed <= 1 + high)

    def cost(self, candidate: Candidate) -> Cost:
        """Time, device-hours and money of the budget's tokens, or of a billion."""
        return self.budget.cost(candidate.tokens_per_s, self.problem.cluster)

    def mfu(self, candidate: Candidate) -> float:
        return mfu_of(self.problem, self.units, candidate)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""

        def told(candidate: Candidate) -> dict[str, Any]:
            return {"mfu": self.mfu(candidate), **candidate.to_dict()}

        return {
            "schema": 1,
            "kind": "predicted",
            "model": self.problem.model.name,
            "cluster": str(self.problem.cluster),
            "job": self.problem.job.model_dump(mode="json", exclude_none=True),
            "objective": self.objective,
            "aim": self.aim,
            **({"size": self.size_choice.to_dict(self.budget)} if self.size_choice else {}),
            "cost": self.cost(self.winner).to_dict() if self.winner else None,
            "winner": told(self.winner) if self.winner else None,
            "layouts": [told(c) for c in self.layouts],
            "baselines": [
                {
                    "name": b.name,
                    "needed_bytes": round(b.needed_bytes),
                    **({"tokens_per_s": b.candidate.tokens_per_s} if b.candidate else {}),
                }
                for b in self.baselines
            ],
            "rejected": [
                {"layout": str(r.strategy), "least_bytes": round(r.needed_bytes)}
                for r in self.rejected
            ],
            "pareto": [told(c) for c in self.front],
            "why": self.why,
            "binding": self.limits.binding if self.limits else "memory",
            "slack": {
                "memory_bytes": round(self.limits.free_bytes),
                "network_factor": self.limits.network_slack,
            }
            if self.limits
            else None,
            "tips": self.tips,
            "would_fit": [way._asdict() for way in self.ways],
            "considered": self.considered,
            "fitting": self.fitting,
            "limit_bytes": self.limit_bytes,
            "error_interval": list(self.interval),
            "comparison_interval": list(self.comparison),
            "fitted": self.fitted,
        }


def check(problem: Problem) -> None:
    """Say what keeps the time from being known."""
    cluster, dtype = problem.cluster, problem.base.param_dtype
    if cluster.nodes > 1 and cluster.network is None:
        raise SpecError(
            f"cluster: {cluster.nodes} nodes need a network between them to be planned; write it "
            f"per device, such as {cluster}@400Gbps"
        )
    if coefficients_for(cluster) is None:
        raise SpecError(
            "cluster: step times of these CPUs are not known; measure them with 'shardwise "
            "calibrate', or ask 'shardwise estimate' for memory alone"
        )
    if hardware_of(cluster, dtype) is None:
        known = ", ".join(cluster.device.peak) or "none"
        raise SpecError(
            f"precision: {cluster.device.name} has no known peak for {dtype}; known are {known}"
        )


def make_plan(
    problem: Problem,
    *,
    objective: Objective = "throughput",
    space: Space | None = None,
    current: Strategy | None = None,
    budget: Budget | None = None,
) -> Plan:
    """Search, choose by the objective, and explain.

    For `sequence` and `money` the answer has a sequence length or a cluster of its own.
    """
    check(problem)
    aim = ""
    size_choice: SizeChoice | None = None
    budget = budget or Budget()
    budget.price_of(problem.cluster.device.name)
    if objective == "sequence":
        problem, aim = _longest(problem)
    elif objective == "money":
        size_choice = choose_size(by_size(problem, space), budget, problem.cluster.devices)
        if size_choice.chosen is not None:
            problem = problem._replace(cluster=size_choice.chosen.cluster)
    if problem.base.devices != problem.cluster.devices:
        current = None
    search = Search(problem, space)
    found = search.run()
    winner = chosen(found, objective)
    units = search.units
    limits = limits_of(problem, units, found, winner) if winner else None
    return Plan(
        problem=problem,
        units=units,
        objective=objective,
        aim=aim,
        budget=budget,
        size_choice=size_choice,
        winner=winner,
        layouts=found.layouts(),
        baselines=_baselines(problem, units, found, current),
        rejected=found.rejected(),
        front=[c for c in found.front() if winner and c.needed_bytes < winner.needed_bytes],
        why=reasons(search, found, winner) if winner else [],
        limits=limits,
        limits_why=_limits(problem, objective, winner, limits),
        tips=[
            *_tips(problem, units, found, winner),
            *([] if winner else _offloaded(problem, search.space)),
        ],
        ways=[] if winner else _ways(problem, units, found),
        considered=found.considered,
        fitting=found.fitting,
        limit_bytes=found.limit_bytes,
        interval=error_interval(problem.cluster),
        fitted=is_fitted(problem.cluster),
        comparison=coefficient("step-comparison"),
    )


def _longest(problem: Problem) -> tuple[Problem, str]:
    found = longest(problem)
    if found is None:
        return problem, ""
    aim = f"The longest sequence is {found.tokens:,} tokens; {found.why_not_longer}"
    return problem._replace(job=problem.job.but(seq_len=found.tokens)), aim


def chosen(found: Found, objective: Objective) -> Candidate | None:
    best = found.best()
    if best is None or objective != "memory":
        return best
    return found.smallest(FAST_ENOUGH * best.tokens_per_s)


def _baselines(
    problem: Problem, units: Units, found: Found, current: Strategy | None
) -> list[Baseline]:
    baselines = []
    if "ddp" in found.nearest:
        nearest = found.nearest["ddp"]
        best = found.best("ddp")
        strategy = best.strategy if best else nearest.strategy
        needed = best.needed_bytes if best else nearest.needed_bytes
        baselines.append(Baseline("ddp", strategy, needed, best))
    if current is not None:
        priced = price_one(problem, units, current)
        fits = priced.needed_bytes <= found.limit_bytes
        baselines.append(Baseline("now", current, priced.needed_bytes, priced if fits else None))
    return baselines


def _limits(
    problem: Problem, objective: Objective, winner: Candidate | None, limits: Limits | None
) -> list[str]:
    if winner is None or limits is None:
        return []
    first, slack = limits_in_words(problem, winner, limits)
    # What limits the speed is no answer to other questions.
    return [slack] if objective in ("memory", "sequence") else [first, slack]


def _tips(problem: Problem, units: Units, found: Found, winner: Candidate | None) -> list[str]:
    """What was not chosen for other reasons and would bring more."""
    tips = [_daring(problem, found, winner)]
    positions = getattr(problem.model, "max_positions", None)
    if positions is not None and problem.job.seq_len > positions:
        tips.append(f"The model was made for sequences of {positions:,}.")
    if winner is None:
        return [tip for tip in tips if tip]
    strategy = winner.strategy
    if strategy.sharded and strategy.reduce_dtype == "fp32" and strategy.param_dtype != "fp32":
        low = price_one(problem, units, strategy.but(reduce_dtype=strategy.param_dtype))
        gain = low.tokens_per_s / winner.tokens_per_s - 1
        if gain > 0.01:
            tips.append(
                f"Reducing gradients in {strategy.param_dtype} would bring {gain:.0%}, and change "
                "the arithmetic: --allow-low-precision-reduce."
            )
    if problem.job.global_batch is None:
        tips.append("With --global-batch, accumulation is searched too.")
    return [tip for tip in tips if tip]


def _offloaded(problem: Problem, space: Space) -> list[str]:
    """The fastest that fits when parameters and states live on the host."""
    if problem.cluster.device.is_cpu:
        return []
    best = Search(problem, space.quick()._replace(offload=True)).run().best()
    if best is None:
        return []
    s = best.strategy
    return [
        f"Offloaded to the host it fits: {s}, micro-batch {s.micro_batch}, recompute "
        f"{show_recompute(s.recompute)}, {show_gib(best.needed_bytes)} per device, about "
        f"{best.step_s:,.3g} s a step (the host's links and memory are assumed, not measured)."
    ]


def _daring(problem: Problem, found: Found, winner: Candidate | None) -> str:
    """What fits if the allocator wastes as little as usual, instead of as much as it may."""
    device = problem.cluster.device
    low, high = coefficient("reserved_over_pools")
    outside = coefficient("outside_allocator")[1] * 2**30
    usual = 2 * (device.capacity - outside) / (low + high)
    if usual <= 0 or found.limit_bytes <= 0:
        return ""
    daring = found.best(memory=usual / found.limit_bytes)
    if daring is None or daring.needed_bytes <= found.limit_bytes:
        return ""
    s = daring.strategy
    what = (
        f"{s}, micro-batch {s.micro_batch}, recompute {show_recompute(s.recompute)}: "
        f"{show_gib(daring.needed_bytes)} with pools, if the allocator wastes little."
    )
    if winner is None:
        return f"At risk, but likely to fit: {what}"
    gain = daring.tokens_per_s / winner.tokens_per_s - 1
    return f"At risk, but {gain:.0%} faster: {what}" if gain >= WORTH else ""


def _ways(problem: Problem, units: Units, found: Found) -> list[Change]:
    """From the configuration that comes nearest."""
    if not found.nearest:
        return []
    nearest = min(found.nearest.values(), key=lambda n: n.needed_bytes)
    return ways_to_fit(units.of(nearest.strategy), nearest.strategy, problem.cluster, problem.job)
