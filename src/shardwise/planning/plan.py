"""A plan: the recommended configuration, its rivals, and the reasons."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from shardwise.planning.choice import ClosestToFitting
from shardwise.planning.limits import Limits
from shardwise.planning.money import Budget, Cost, SizeChoice
from shardwise.planning.price import mfu_of
from shardwise.planning.problem import Problem, Units
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.rows import Candidate
from shardwise.planning.ways import Change
from shardwise.predict.estimate import price
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.step.notebook import html_of
from shardwise.step.profile import StepProfile, Verdict

Objective = Literal["throughput", "memory", "sequence", "money"]


class Baseline(NamedTuple):
    """A configuration to compare with; `candidate` is None if it does not fit."""

    name: str
    strategy: Strategy
    needed_bytes: float
    verdict: Verdict
    candidate: Candidate | None


class Plan(NamedTuple):
    """The result of `plan`: the recommended configuration, alternatives, and reasons.

    `winner` is None if no configuration fits; `ways` then lists changes that make one fit.
    """

    problem: Problem
    units: Units
    objective: Objective
    # What the objectives sequence and memory decided; None for others.
    aim: Reason | None
    budget: Budget
    # For the objective money: the best on each part of the cluster, and which part was chosen.
    size_choice: SizeChoice | None
    winner: Candidate | None
    # The best of each layout, the fastest first.
    layouts: list[Candidate]
    baselines: list[Baseline]
    rejected: list[ClosestToFitting]
    # Lower-memory options: each is the best with clearly less memory than the one before.
    front: list[Candidate]
    why: list[Reason]
    limits: Limits | None
    limits_why: list[Reason]
    tips: list[Reason]
    # Shown before everything else.
    warnings: list[Reason]
    ways: list[Change]
    # Whether the search was restricted to what another stack can run.
    for_stack: bool
    considered: int
    fitting: int
    limit_bytes: int
    # Relative error of tokens/s in nine of ten runs.
    interval: tuple[float, float]
    # The interval after one more measured step; None if measuring does not apply.
    narrower: tuple[float, float] | None
    # Whether step times were fitted to runs on such devices, or calibrated.
    fitted: bool
    # Relative error of the ratio of two configurations' speeds.
    comparison_error: float

    def __repr__(self) -> str:
        best = repr(self.winner) if self.winner else "no configuration fits"
        question = f"{self.problem.model.name} on {self.problem.cluster}"
        return f"Plan({question}: {best}; {self.fitting:,} of {self.considered:,} fit)"

    def _repr_html_(self) -> str:
        return html_of(self)

    def profile(self, one: Candidate | ClosestToFitting) -> StepProfile:
        """Predict one step of a candidate in full detail, as `estimate` does."""
        # `price` groups blocks into units itself.
        units = self.units.of(one.strategy.but(blocks_per_unit=1))
        origin = "formulas" if isinstance(self.problem.model, ModelSpec) else "traced module"
        return price(units, one.strategy, self.problem.cluster, self.problem.job, origin)

    @property
    def withheld(self) -> bool:
        """Whether configurations fit but none is recommended."""
        return self.winner is None and self.fitting > 0

    @property
    def at_risk(self) -> bool:
        """Whether no configuration fits safely, but one fits if the allocator wastes little."""
        device = self.problem.cluster.device
        judged = (one.verdict(device) for one in self.rejected)
        return not self.fitting and "at risk" in judged

    @property
    def late(self) -> bool:
        """Whether there is a winner and it misses the deadline."""
        return self.winner is not None and not self.budget.in_time(self.winner.tokens_per_s)

    @property
    def succeeds(self) -> bool:
        """Whether there is a winner and it meets the deadline, if any."""
        return self.winner is not None and not self.late

    def too_close_to_call(self) -> int:
        """Number of other layouts whose speed is within the comparison error of the winner's."""
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
        """The plan as `--json` prints it."""

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
            **({"list_price": self.budget.listed._asdict()} if self.budget.listed else {}),
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
