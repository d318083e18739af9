"""Plan a cluster of unequal parts: a strategy, and how many micro-batches each part computes.

Each part is priced as if all devices were its own, with one, two and three micro-batches; further
ones take as long as the third. Micro-batches are then dealt to the part that is done first. The
same configurations are tried on each part alone: more devices have to be worth it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from shardwise.planning.batches import BATCH_TOLERANCE, USUAL_BATCH, usual_sizes
from shardwise.planning.make import check_predictable
from shardwise.planning.problem import Problem, Units, peaks, steps, times
from shardwise.planning.rows import complexity
from shardwise.predict.api import estimate_run
from shardwise.predict.configurations import Configurations, Floats, Ints
from shardwise.predict.estimate import usable_bytes
from shardwise.predict.rates import comparison_error
from shardwise.spec.cluster import ClusterPart, ClusterSpec
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.shares import Share
from shardwise.spec.strategy import Loss, Strategy
from shardwise.step.profile import StepProfile

_RECOMPUTE = ("none", "selective", 0.5, "full")
# Micro-batches of a step that are priced.
_PRICED = (1, 2, 3)
# Most rounds in which micro-batches are dealt.
_MOST_ROUNDS = 4096


class Choice(NamedTuple):
    """A resolved strategy, with shares where they differ, and the predicted seconds of its step."""

    strategy: Strategy
    step_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second of all devices."""
        return self.tokens / self.step_s

    def to_dict(self) -> dict[str, Any]:
        strategy = self.strategy.model_dump(mode="json", exclude={"within_node"})
        return {**self._asdict(), "tokens_per_s": self.tokens_per_s, "strategy": strategy}


class Alone(NamedTuple):
    """One part of the cluster without the others: the fastest that fits it; None if none does."""

    part: ClusterPart
    cluster: ClusterSpec
    best: Choice | None


class UnequalPlan(NamedTuple):
    """The fastest configuration of an unequal cluster, and what it is compared with."""

    run: RunSpec
    # The fastest that fits all parts; None if none does.
    best: Choice | None
    # The fastest in which all devices have equal shares.
    equal: Choice | None
    alone: tuple[Alone, ...]
    considered: int

    @property
    def fastest_alone(self) -> Alone | None:
        """The part that is fastest without the others; None if the model fits none of them."""
        fitting = [one for one in self.alone if one.best is not None]
        return max(fitting, key=lambda one: one.best.tokens_per_s if one.best else 0, default=None)

    @property
    def gain(self) -> float | None:
        """Throughput relative to the fastest part alone, minus 1; None without one of the two."""
        alone = self.fastest_alone
        if self.best is None or alone is None or alone.best is None:
            return None
        return self.best.tokens_per_s / alone.best.tokens_per_s - 1

    @property
    def winner(self) -> Choice | None:
        """The configuration to run; None where the parts cannot pay together."""
        pays = self.gain is None or self.gain > comparison_error()
        return self.best if pays else None

    @property
    def chosen(self) -> RunSpec | None:
        """The run of the winner; None without one."""
        if self.winner is None:
            return None
        job = self.run.job.but(global_batch=self.winner.tokens)
        return self.run._replace(strategy=self.winner.strategy, job=job)

    @property
    def profile(self) -> StepProfile | None:
        """The predicted step of the winner; None without one."""
        return None if self.chosen is None else estimate_run(self.chosen)

    def to_dict(self) -> dict[str, Any]:
        """The plan as `--json` prints it."""
        profile = self.profile

        def told(choice: Choice | None) -> dict[str, Any] | None:
            return None if choice is None else choice.to_dict()

        return {
            "schema": 1,
            "kind": "predicted",
            "cluster": str(self.run.cluster),
            "winner": told(self.winner),
            "best": told(self.best),
            "equal": told(self.equal),
            "alone": [{"cluster": str(a.cluster), "best": told(a.best)} for a in self.alone],
            "gain": self.gain,
            "comparison_error": comparison_error(),
            "considered": self.considered,
            "profile": None if profile is None else profile.to_dict(),
        }


def plan_unequal(
    run: RunSpec, *, loss: Loss | None = None, tolerance: float = BATCH_TOLERANCE
) -> UnequalPlan:
    """Plan a run whose cluster has parts.

    `tolerance` is by what share a step may differ from the global batch; `loss` is given to all.
    """
    assert run.cluster.parts is not None
    parts = run.cluster.parts
    problem = Problem(run.model, run.cluster, run.job, run.strategy.but(shares=None))
    together = [run.cluster.as_if(part) for part in parts]
    found = _Table(problem, together, [part.devices for part in parts], loss)
    alone = []
    for part in parts:
        cluster = run.cluster.alone(part)
        by_itself = _Table(problem._replace(cluster=cluster), [cluster], [part.devices], loss)
        alone.append(Alone(part, cluster, by_itself.best(tolerance, equal=True)))
    return UnequalPlan(
        run=run,
        best=found.best(tolerance),
        equal=found.best(tolerance, equal=True),
        alone=tuple(alone),
        considered=len(found.strategies),
    )


class _Table:
    """All strategies for a cluster of parts: which fit, and their seconds by part."""

    def __init__(
        self,
        problem: Problem,
        clusters: Sequence[ClusterSpec],
        devices: Sequence[int],
        loss: Loss | None,
    ) -> None:
        for cluster in clusters:
            check_predictable(problem._replace(cluster=cluster))
        self.problem, self.devices = problem, devices
        units = Units(problem)
        losses: tuple[Loss, ...] = ("plain", "chunked") if units.can_chunk else ("plain",)
        losses = (loss,) if loss else losses
        self.strategies = list(_strategies(problem, gcd(*devices), losses))
        shape = len(self.strategies), len(clusters)
        self.fits = np.zeros(shape, dtype=bool)
        self.seconds: Floats = np.zeros((*shape, len(_PRICED)))
        by_units: dict[tuple[object, ...], list[int]] = {}
        for number, strategy in enumerate(self.strategies):
            by_units.setdefault(units.key(strategy), []).append(number)
        for rows in by_units.values():
            of = units.of(self.strategies[rows[0]])
            for part, cluster in enumerate(clusters):
                here = problem._replace(cluster=cluster)
                columns = Configurations.of([self.strategies[row] for row in rows])
                for step, count in enumerate(_PRICED):
                    columns.accumulate = np.full(len(rows), count, dtype=np.int64)
                    priced = steps(of, columns, here)
                    _, needed = peaks(priced, here)
                    fits = needed <= usable_bytes(cluster.device)
                    self.fits[rows, part] = fits & (self.fits[rows, part] | (step == 0))
                    found = times(priced, cluster, problem.base.param_dtype)
                    self.seconds[rows, part, step] = found.step_s

    def best(self, tolerance: float, *, equal: bool = False) -> Choice | None:
        """The simplest of the fastest strategies that fit; `equal` gives all the same share."""
        rows: Ints = np.flatnonzero(self.fits.all(axis=1))
        # At most as fast as if nothing but the further micro-batches took time.
        tokens = self.problem.job.seq_len * np.asarray([s.micro_batch for s in self.strategies])
        inner = self.problem.base.mesh.inner
        per_s = np.asarray(self.devices) / inner / (self.seconds[..., 2] - self.seconds[..., 1])
        bound = per_s.sum(axis=1) * tokens
        found: list[Choice] = []
        fastest, error = 0.0, comparison_error()
        for row in rows[np.argsort(-bound[rows])].tolist():
            if bound[row] < fastest * (1 - error):
                break
            choice = self._split(row, tolerance, equal)
            if choice is not None:
                found.append(choice)
                fastest = max(fastest, choice.tokens_per_s)
        near = [one for one in found if one.tokens_per_s >= fastest * (1 - error)]
        return min(
            near,
            key=lambda one: (
                complexity(one.strategy, one.strategy.recompute, one.strategy.accumulate > 1),
                -one.tokens_per_s,
            ),
            default=None,
        )

    def _split(self, row: int, tolerance: float, equal: bool) -> Choice | None:
        """The fastest division of a step; None if none has the global batch."""
        strategy, job = self.strategies[row], self.problem.job
        ranks = [devices // strategy.mesh.inner for devices in self.devices]
        each = job.seq_len * strategy.micro_batch
        wanted = None if job.global_batch is None else job.global_batch / each
        most = USUAL_BATCH / each if wanted is None else wanted * (1 + tolerance)
        found: Choice | None = None
        for counts in self._divisions(row, ranks, wanted, most, equal):
            total = sum(n * count for n, count in zip(ranks, counts, strict=True))
            if wanted is not None and abs(total / wanted - 1) > tolerance:
                continue
            step_s = max(self._seconds(row, part, count) for part, count in enumerate(counts))
            if found is not None and total * each / step_s <= found.tokens_per_s:
                continue
            shared = _with_shares(strategy, self.devices, counts)
            if shared is not None:
                found = Choice(shared, step_s, total * each)
        return found

    def _divisions(
        self, row: int, ranks: Sequence[int], wanted: float | None, most: float, equal: bool
    ) -> Iterator[tuple[int, ...]]:
        """Micro-batches by part: equal ones, and those dealt to the part that is done first."""
        rounds = range(1, min(_MOST_ROUNDS, max(1, int(most / sum(ranks)))) + 1)
        if wanted is not None:
            near = wanted / sum(ranks)
            rounds = range(max(1, int(near)), int(near) + 2)
        yield from ((count,) * len(ranks) for count in rounds)
        if equal:
            return
        counts = [1] * len(ranks)
        for _ in range(_MOST_ROUNDS):
            total = sum(n * count for n, count in zip(ranks, counts, strict=True))
            if total > most:
                return
            yield tuple(counts)
            yield from _completed(counts, ranks, wanted)
            first = min(range(len(ranks)), key=lambda p: self._seconds(row, p, counts[p] + 1))
            counts[first] += 1

    def _seconds(self, row: int, part: int, count: int) -> float:
        """Predicted seconds of a step in which a part computes so many micro-batches."""
        known = self.seconds[row, part]
        if count <= len(_PRICED):
            return float(known[count - 1])
        return float(known[1] + (count - 2) * (known[2] - known[1]))


def _completed(
    counts: Sequence[int], ranks: Sequence[int], wanted: float | None
) -> Iterator[tuple[int, ...]]:
    """The counts with that of one part changed so that they are exactly what is wanted."""
    if wanted is None or wanted != int(wanted):
        return
    total = sum(n * count for n, count in zip(ranks, counts, strict=True))
    for part, n in enumerate(ranks):
        missing = int(wanted) - total
        if missing % n == 0 and counts[part] + missing // n >= 1:
            yield tuple(
                count + (missing // n if p == part else 0) for p, count in enumerate(counts)
            )


def _with_shares(
    strategy: Strategy, devices: Sequence[int], counts: Sequence[int]
) -> Strategy | None:
    """The strategy with these micro-batches by part; None if it needs equal ones."""
    if len(set(counts)) == 1:
        return strategy.but(accumulate=counts[0])
    shares = tuple(
        Share(devices=n, accumulate=count) for n, count in zip(devices, counts, strict=True)
    )
    try:
        shared = strategy.but(accumulate=max(counts), shares=shares)
        return shared.resolve(shared.devices, shared.devices)
    except SpecError:
        return None


def _strategies(problem: Problem, common: int, losses: Sequence[Loss]) -> Iterator[Strategy]:
    """Resolved strategies for the cluster; `common` divides the devices of each part."""
    cluster, job = problem.cluster, problem.job
    devices = cluster.devices
    unset = {"reshard_after_forward": None, "reshard_after_backward": None, "grad_sync": None,
             "within_node": False, "replicate": None, "split_root": False}  # fmt: skip
    placements: list[dict[str, object]] = [{"kind": "single" if devices == 1 else "ddp"}]
    groups = {devices} | {common // part for part in (1, 2, 4, 8) if common % part == 0}
    for size in sorted(groups - {1}, reverse=True):
        placements += [{"kind": kind, "shard": size} for kind in ("zero1", "zero2", "zero3")]
    most = job.global_batch and job.global_batch * (1 + BATCH_TOLERANCE) / job.seq_len / devices
    for size in usual_sizes(job, cluster):
        if most and size > most:
            continue
        for placed in placements:
            for recompute in _RECOMPUTE:
                for loss in losses:
                    fields = {"shard": None, **unset, **placed, "micro_batch": size,
                              "accumulate": 1, "recompute": recompute, "loss": loss}  # fmt: skip
                    try:
                        yield problem.base.but(**fields).resolve(devices, cluster.devices_per_node)
                    except SpecError:
                        continue
