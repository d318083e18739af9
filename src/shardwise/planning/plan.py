"""A plan: the recommended configuration, its rivals, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from shardwise.planning.alternatives import alternatives, same_with_smaller_states
from shardwise.planning.batches import UnevenBatchError
from shardwise.planning.choice import Found, Nearest
from shardwise.planning.explain import limit_reasons, padding, reasons
from shardwise.planning.limits import Limits, limits_of
from shardwise.planning.money import Budget, Cost, SizeChoice, Sized, by_size, choose_size
from shardwise.planning.price import mfu_of, price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.reasons.limits import (
    CompileGain,
    GradientsUnsharded,
    LowPrecisionReduce,
    RiskyAlternative,
    ShorterFits,
)
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.reasons.warnings import LeastMemory
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.sequence import longest
from shardwise.planning.space import Space
from shardwise.planning.untried import untried
from shardwise.planning.warnings import fewer_devices, is_uneven, left_out, warnings_of
from shardwise.planning.ways import Change, ways_to_fit
from shardwise.predict.estimate import price
from shardwise.predict.intervals import after_a_step, error_interval, is_fitted, regime_of
from shardwise.predict.kernels import check_products, coefficients_for
from shardwise.predict.rates import (
    comparison_error,
    hardware_of,
)
from shardwise.spec.catalogue import coefficient, figure
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step.notebook import html_of
from shardwise.step.profile import StepProfile, Verdict

Objective = Literal["throughput", "memory", "sequence", "money"]
# The objective "memory" takes the least memory of those with this share of the best throughput.
FAST_ENOUGH = 0.9
# Reducing gradients in low precision is worth a tip from this gain on.
MIN_REDUCE_GAIN = 0.01
# A gain from torch.compile below this is not worth a line.
MIN_COMPILE_GAIN = 0.01


class Baseline(NamedTuple):
    """A configuration to compare with; no speed where it does not fit."""

    name: str
    strategy: Strategy
    needed_bytes: float
    verdict: Verdict
    candidate: Candidate | None


class Plan(NamedTuple):
    """The answer of `plan`. `winner` is None if none fits; then `ways` says what would."""

    problem: Problem
    units: Units
    objective: Objective
    # What the objective decided, where it is not throughput.
    aim: Reason | None
    budget: Budget
    # For money: the best on each part of the cluster, and which part was chosen.
    size_choice: SizeChoice | None
    winner: Candidate | None
    # The best of each layout, the fastest first.
    layouts: list[Candidate]
    baselines: list[Baseline]
    rejected: list[Nearest]
    # The best with less memory than the winner, with less than that, and so on.
    front: list[Candidate]
    why: list[Reason]
    limits: Limits | None
    limits_why: list[Reason]
    tips: list[Reason]
    # What to know before it is trusted, to be said first.
    warnings: list[Reason]
    ways: list[Change]
    # Whether figures are those of another stack, whose limits the search kept to.
    for_stack: bool
    considered: int
    fitting: int
    limit_bytes: int
    # Of tokens/s; and whether it was fitted for this family of devices.
    interval: tuple[float, float]
    # The same once one more step is measured; None where that changes nothing.
    narrower: tuple[float, float] | None
    fitted: bool
    # Of the ratio of two configurations' speeds.
    comparison_error: float

    def __repr__(self) -> str:
        best = repr(self.winner) if self.winner else "no configuration fits"
        question = f"{self.problem.model.name} on {self.problem.cluster}"
        return f"Plan({question}: {best}; {self.fitting:,} of {self.considered:,} fit)"

    def _repr_html_(self) -> str:
        return html_of(self)

    def profile(self, one: Candidate | Nearest) -> StepProfile:
        """Predict the step of a candidate term by term, as `estimate` does."""
        # Predictions form the units themselves.
        units = self.units.of(one.strategy.but(blocks_per_unit=1))
        origin = "formulas" if isinstance(self.problem.model, ModelSpec) else "traced module"
        return price(units, one.strategy, self.problem.cluster, self.problem.job, origin)

    @property
    def withheld(self) -> bool:
        """Whether configurations fit and none is recommended."""
        return self.winner is None and self.fitting > 0

    @property
    def at_risk(self) -> bool:
        """Whether none fits, and one would run if the allocator wasted little."""
        device = self.problem.cluster.device
        judged = (one.verdict(device) for one in self.rejected)
        return not self.fitting and "at risk" in judged

    @property
    def late(self) -> bool:
        """Whether the winner misses the deadline."""
        return self.winner is not None and not self.budget.in_time(self.winner.tokens_per_s)

    @property
    def succeeds(self) -> bool:
        """Whether a configuration fits, and meets the deadline."""
        return self.winner is not None and not self.late

    def too_close_to_call(self) -> int:
        """How many other layouts differ too little from the winner to tell which is faster."""
        if self.winner is None:
            return 0
        return sum(
            abs(c.tokens_per_s / self.winner.tokens_per_s - 1) <= self.comparison_error
            for c in self.layouts
            if c.layout != self.winner.layout
        )

    def cost(self, candidate: Candidate) -> Cost:
        """Time, device-hours and money of the budget's tokens, or of a billion."""
        return self.budget.cost(candidate.tokens_per_s, self.problem.cluster)

    def mfu(self, candidate: Candidate) -> float:
        return mfu_of(self.problem, self.units, candidate)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""

        def told(candidate: Candidate) -> dict[str, Any]:
            tokens = self.problem.job.tokens_per_step(candidate.strategy)
            figures = {"mfu": self.mfu(candidate), "tokens_per_step": tokens}
            return {**figures, **candidate.to_dict()}

        return {
            "schema": 1,
            "kind": "predicted",
            "model": self.problem.model.name,
            "cluster": str(self.problem.cluster),
            "job": self.problem.job.model_dump(mode="json", exclude_none=True),
            "objective": self.objective,
            "aim": self.aim.to_dict() if self.aim else None,
            **({"size": self.size_choice.to_dict(self.budget)} if self.size_choice else {}),
            "cost": self.cost(self.winner).to_dict() if self.winner else None,
            "winner": told(self.winner) if self.winner else None,
            "layouts": [told(c) for c in self.layouts],
            "baselines": [
                {
                    "name": b.name,
                    "needed_bytes": round(b.needed_bytes),
                    "verdict": b.verdict,
                    **({"tokens_per_s": b.candidate.tokens_per_s} if b.candidate else {}),
                }
                for b in self.baselines
            ],
            "rejected": [
                {
                    **r.layout.to_dict(),
                    "least_bytes": round(r.needed_bytes),
                    "verdict": r.verdict(self.problem.cluster.device),
                }
                for r in self.rejected
            ],
            "pareto": [told(c) for c in self.front],
            "why": [reason.to_dict() for reason in (*self.why, *self.limits_why)],
            "binding": self.limits.binding if self.limits else "memory",
            "slack": {
                "memory_bytes": round(self.limits.free_bytes),
                "network_factor": self.limits.network_slack,
            }
            if self.limits
            else None,
            "warnings": [warning.to_dict() for warning in self.warnings],
            "tips": [tip.to_dict() for tip in self.tips],
            "would_fit": [way._asdict() for way in self.ways],
            "considered": self.considered,
            "fitting": self.fitting,
            "limit_bytes": self.limit_bytes,
            "error_interval": list(self.interval),
            "interval_after_a_step": list(self.narrower) if self.narrower else None,
            "comparison_interval": [-self.comparison_error, self.comparison_error],
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
            + ("; use --precision fp16" if "fp16" in cluster.device.peak else "")
        )
    check_products(cluster, problem.base)


def make_plan(
    problem: Problem,
    *,
    objective: Objective = "throughput",
    space: Space | None = None,
    current: Strategy | None = None,
    budget: Budget | None = None,
    in_full: bool = True,
) -> Plan:
    """Search, choose by the objective, and give the reasons.

    For `sequence` and `money` the answer has a sequence length or a cluster of its own.
    Not `in_full`, the plans for other networks are left out: they take a third of the time.
    """
    check(problem)
    budget = budget or Budget()
    problem, aim, size_choice = _aimed(problem, objective, space, budget)
    search, found, warnings = _searched(problem, space or Space())
    problem, units = search.problem, search.units
    winner = found.best()
    if objective == "memory" and winner is not None:
        winner, aim = _least_memory(found)
    size_choice = _with_winner(size_choice, winner, budget)
    lacking = left_out(problem, units, search.space, winner)
    withheld = lacking is not None and not lacking.recommended
    winner = None if withheld else winner
    warnings = [
        *filter(None, [lacking, *warnings]),
        *warnings_of(problem, search.space, found, winner, objective != "sequence"),
    ]
    limits = limits_of(search, problem.cluster, found, winner, in_full) if winner else None
    regime = regime_of(units.of(problem.base))
    return Plan(
        problem=problem,
        units=units,
        objective=objective,
        aim=aim,
        budget=budget._replace(regime=regime),
        size_choice=size_choice,
        winner=winner,
        layouts=found.layouts(),
        baselines=_baselines(problem, units, found, current),
        rejected=found.rejected(),
        front=found.lower_memory(winner) if winner else [],
        why=reasons(search, found, winner, objective != "memory", in_full) if winner else [],
        limits=limits,
        limits_why=_limits(problem, objective, winner, limits),
        tips=[] if withheld else _tips(search, found, winner, objective),
        warnings=warnings,
        ways=[] if winner or withheld else _ways(search, found),
        for_stack=search.space.for_stack,
        considered=found.considered,
        fitting=found.fitting,
        limit_bytes=found.limit_bytes,
        interval=error_interval(problem.cluster, regime),
        narrower=after_a_step(problem.cluster, regime),
        fitted=is_fitted(problem.cluster),
        comparison_error=comparison_error(),
    )


def _with_winner(
    choice: SizeChoice | None, winner: Candidate | None, budget: Budget
) -> SizeChoice | None:
    """The choice with what a whole search found on the chosen size, if it chose and found one."""
    if choice is None or choice.chosen is None or winner is None:
        return choice
    chosen = choice.chosen
    sizes = [Sized(s.cluster, winner) if s is chosen else s for s in choice.sizes]
    return choose_size(sizes, budget, choice.all_devices, chosen.cluster.devices)


def _aimed(
    problem: Problem, objective: Objective, space: Space | None, budget: Budget
) -> tuple[Problem, Reason | None, SizeChoice | None]:
    """The problem with the sequence length or the cluster that an objective asks for; and why.

    Raises SpecError where prices are given but not for this device.
    """
    budget.price_of(problem.cluster.device.name)
    aim: Reason | None = None
    size_choice: SizeChoice | None = None
    if objective == "sequence":
        aim = longest(problem, space)
        if aim is not None:
            problem = problem._replace(job=problem.job.but(seq_len=aim.tokens))
    elif objective == "money":
        size_choice = choose_size(by_size(problem, space), budget, problem.cluster.devices)
        if size_choice.chosen is not None:
            problem = problem._replace(cluster=size_choice.chosen.cluster)
    return problem, aim, size_choice


def _searched(problem: Problem, space: Space) -> tuple[Search, Found, list[Reason]]:
    """The search; where the batch divides over fewer devices only, the faster of what keeps it.

    That is on all devices, groups of which share sequences, or on fewer of them.
    """
    search = Search(problem, space)
    if not is_uneven(problem, space):
        return search, search.run(), []
    part = fewer_devices(problem, space)
    try:
        found: Found | None = search.run()
    except UnevenBatchError:
        if part is None:
            raise
        found = None
    divided = found.best() if found else None
    if part is None:
        assert found is not None, "raised above"
        return search, found, []
    on_fewer = Search(problem._replace(cluster=part[0]), space)
    there = on_fewer.run()
    best = there.best()
    if found is not None and (
        best is None
        # Fewer devices and whole sequences are simpler, unless they are clearly slower.
        or (divided and (1 - comparison_error()) * divided.tokens_per_s >= best.tokens_per_s)
    ):
        return search, found, []
    return on_fewer, there, [part[1]]


def _least_memory(found: Found) -> tuple[Candidate, LeastMemory]:
    best = found.fastest()
    assert best is not None, "something fits"
    fastest = best.tokens_per_s
    winner = found.smallest(FAST_ENOUGH * fastest)
    assert winner is not None, "the fastest is fast enough"
    return winner, LeastMemory(
        share=FAST_ENOUGH,
        fastest_tokens_per_s=fastest,
        throughput=winner.tokens_per_s / fastest - 1,
    )


def _baselines(
    problem: Problem, units: Units, found: Found, current: Strategy | None
) -> list[Baseline]:
    baselines = []
    nearest, device = found.nearest_of("ddp"), problem.cluster.device
    if nearest is not None:
        best = found.best(kind="ddp")
        shown = best or nearest
        judged = "fits" if best else nearest.verdict(device)
        baselines.append(Baseline("ddp", shown.strategy, shown.needed_bytes, judged, best))
    # A strategy of another number of devices is none of these.
    if current is not None and problem.base.devices == problem.cluster.devices:
        priced = price_one(problem, units, current)
        judged = Nearest(current, priced.peak_bytes, priced.needed_bytes).verdict(device)
        fits = priced if judged == "fits" else None
        baselines.append(Baseline("now", current, priced.needed_bytes, judged, fits))
    return baselines


def _limits(
    problem: Problem, objective: Objective, winner: Candidate | None, limits: Limits | None
) -> list[Reason]:
    if winner is None or limits is None:
        return []
    binding, slack = limit_reasons(problem, winner, limits)
    # What limits the speed is no answer to other questions.
    return [slack] if objective in ("memory", "sequence") else [binding, slack]


def _tips(
    search: Search, found: Found, winner: Candidate | None, objective: Objective
) -> list[Reason]:
    """What was not chosen for other reasons and would bring more, or what would help to fit."""
    problem, units = search.problem, search.units
    tips: list[Reason] = list(_risky_alternative(problem, found, winner))
    if winner is None:
        return [*tips, *_helps(search, found, objective)]
    if found.is_tight(winner):
        tips += alternatives(problem, search.space, winner)
    else:
        tips += same_with_smaller_states(problem, units, search.space, winner)
    strategy = winner.strategy
    if strategy.sharded and strategy.reduce_dtype == "fp32" and strategy.param_dtype != "fp32":
        low = price_one(problem, units, strategy.but(reduce_dtype=strategy.param_dtype))
        gain = low.tokens_per_s / winner.tokens_per_s - 1
        if gain > MIN_REDUCE_GAIN:
            tips.append(LowPrecisionReduce(dtype=strategy.param_dtype, gain=gain))
    return [*tips, *_compiled(problem, units, winner), *untried(problem, winner)]


def _compiled(problem: Problem, units: Units, winner: Candidate) -> Iterator[Reason]:
    """What torch.compile would bring the recommended configuration."""
    if winner.strategy.compile or not isinstance(problem.model, ModelSpec):
        return
    other = price_one(problem, units, winner.strategy.but(compile=True))
    gain = other.tokens_per_s / winner.tokens_per_s - 1
    if gain > MIN_COMPILE_GAIN:
        yield CompileGain(
            gain=gain,
            saved_bytes=winner.needed_bytes - other.needed_bytes,
            runs=round(figure("compiled_runs")),
        )


def _helps(search: Search, found: Found, objective: Objective) -> list[Reason]:
    """What would help where no configuration fits."""
    problem = search.problem
    return [
        *_gradients_unsharded(problem, search.units, found),
        *_why_nothing_fits(search, found, objective),
        *alternatives(problem, search.space, None),
        *untried(problem, None),
    ]


def _gradients_unsharded(problem: Problem, units: Units, found: Found) -> Iterator[Reason]:
    """What unsharded gradients cost the configuration closest to fitting."""
    if not found.nearest:
        return
    nearest = min(found.nearest.values(), key=lambda n: n.needed_bytes)
    strategy = nearest.strategy
    if strategy.kind != "zero3" or strategy.grad_sync != "last" or strategy.accumulate == 1:
        return
    yield GradientsUnsharded(
        accumulate=strategy.accumulate,
        needed_bytes=nearest.needed_bytes,
        needed_if_sharded_bytes=price_one(
            problem, units, strategy.but(grad_sync="every")
        ).needed_bytes,
    )


def _why_nothing_fits(search: Search, found: Found, objective: Objective) -> Iterator[Reason]:
    """Padding of the configuration closest to fitting, and the sequence that would fit."""
    if found.nearest:
        nearest = min(found.nearest.values(), key=lambda n: n.needed_bytes)
        yield from padding(search, nearest.strategy)
    shorter = longest(search.problem, search.space) if objective != "sequence" else None
    if shorter is not None and shorter.tokens < search.problem.job.seq_len:
        yield ShorterFits(tokens=shorter.tokens)


def _risky_alternative(
    problem: Problem, found: Found, winner: Candidate | None
) -> Iterator[RiskyAlternative]:
    """What fits if the allocator wastes as little as usual, instead of as much as it may."""
    device = problem.cluster.device
    low, high = coefficient("reserved_over_pools")
    outside = coefficient("outside_allocator")[1] * 2**30
    usual = 2 * (device.capacity - outside) / (low + high)
    if usual <= 0 or found.limit_bytes <= 0:
        return
    risky = found.best(memory=usual / found.limit_bytes)
    if risky is None or risky.needed_bytes <= found.limit_bytes:
        return
    gain = risky.tokens_per_s / winner.tokens_per_s - 1 if winner else None
    if gain is None or gain > comparison_error():
        yield RiskyAlternative(strategy=risky.strategy, needed_bytes=risky.needed_bytes, gain=gain)


def _ways(search: Search, found: Found) -> list[Change]:
    """Changes after which the configuration closest to fitting would fit."""
    if not found.nearest:
        return []
    nearest = min(found.nearest.values(), key=lambda n: n.needed_bytes)
    return ways_to_fit(search.problem, nearest.strategy, search.space, search.units)
