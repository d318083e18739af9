"""Parallelism that shardwise does not run, where it would matter to a plan."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planning.batches import USUAL_BATCH
from shardwise.planning.problem import Problem
from shardwise.planning.reasons.limits import OtherParallelism
from shardwise.planning.rows import Candidate
from shardwise.predict.fit import other_parallelism
from shardwise.predict.rates import comparison_error


def untried(problem: Problem, winner: Candidate | None) -> Iterator[OtherParallelism]:
    """The parallelism not tried that may be better than the winner; at most one reason.

    Expert parallelism may always be: it keeps experts where they are. Any other only where the
    winner lacks what it brings.
    """
    if problem.cluster.devices == 1:
        return
    kinds = other_parallelism(problem.model)
    if winner is not None and not _lacking(problem, winner):
        kinds = tuple(kind for kind in kinds if kind == "expert")
    if kinds:
        yield OtherParallelism(parallelism=kinds)


def _lacking(problem: Problem, winner: Candidate) -> bool:
    """Whether the winner waits noticeably, or has a larger batch than is usual.

    What a step waits for communication is the most that other parallelism could save: less than
    the error of comparison would be too close to call. And data parallelism needs a sequence for
    each device or group; with other parallelism more devices share one.
    """
    if winner.exposed_s > comparison_error() * winner.step_s:
        return True
    tokens = problem.job.tokens_per_step(winner.strategy)
    return problem.job.global_batch is None and tokens > USUAL_BATCH
