"""Kinds of parallelism that shardwise does not run but that could improve a plan."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planning.batches import USUAL_BATCH
from shardwise.planning.problem import Problem
from shardwise.planning.reasons.limits import OtherParallelism
from shardwise.planning.rows import Candidate
from shardwise.predict.fit import other_parallelism
from shardwise.predict.rates import comparison_error


def untried_parallelism(problem: Problem, winner: Candidate | None) -> Iterator[OtherParallelism]:
    """A reason that names parallelism not tried that may be better than the winner; at most one.

    Only if no configuration fits, or if the winner waits for communication or has a large batch.
    """
    if problem.cluster.devices == 1:
        return
    kinds = other_parallelism(problem.model)
    if kinds and (winner is None or _could_be_faster(problem, winner)):
        yield OtherParallelism(parallelism=kinds)


def _could_be_faster(problem: Problem, winner: Candidate) -> bool:
    """Whether the winner waits for communication noticeably, or has an unusually large batch.

    Other parallelism could save at most the time that a step waits for communication; less than the
    comparison error would be too close to call. And data parallelism needs a sequence for each
    device or group, while with other parallelism more devices share a sequence.
    """
    if winner.exposed_s > comparison_error() * winner.step_s:
        return True
    tokens = problem.job.tokens_per_step(winner.strategy)
    return problem.job.global_batch is None and tokens > USUAL_BATCH
