"""Without a requested batch: the tokens of a step, accumulated where that is clearly faster.

A search without a global batch takes one micro-batch per step, since more would always be faster.
The tokens per step that it chooses may be faster in several smaller micro-batches, which keep fewer
activations: memory may then hold what was recomputed or gathered again.
"""

from __future__ import annotations

from shardwise.planning.choice import SearchResult
from shardwise.planning.price import price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate
from shardwise.planning.search import PROBED, Search
from shardwise.planning.space import Space
from shardwise.planning.warnings import is_uneven
from shardwise.predict.rates import comparison_error
from shardwise.spec.strategy import Strategy


def with_accumulation(search: Search, found: SearchResult) -> tuple[Search, SearchResult]:
    """The search for the chosen tokens per step, where that finds a clearly faster configuration.

    Else the search and its result as they are, as with a requested batch. A small search decides
    whether the large one is made, which few questions need.
    """
    problem, best = search.problem, found.best()
    if problem.job.global_batch is not None or best is None:
        return search, found
    least = best.tokens_per_s / (1 - comparison_error())
    smaller = _smaller_micro_batches(best.strategy, search.space, problem.job.example)
    if not smaller or _most_tokens_per_s(search, best) <= least:
        return search, found
    tokens = problem.job.tokens_per_step(best.strategy)
    kept = problem._replace(job=problem.job.but(global_batch=tokens))
    # The tokens of groups that share a sequence may not divide over all devices.
    if is_uneven(kept, search.space):
        return search, found
    probed = Search(kept, _probed_space(search.space, best.strategy, smaller)).run().best()
    if probed is None or probed.tokens_per_s <= least:
        return search, found
    again = Search(kept, search.space)
    return again, again.run()


def keeps_current(
    problem: Problem, units: Units, found: SearchResult, winner: Candidate, current: Strategy
) -> Candidate | None:
    """The current configuration, if it fits and the winner is not clearly faster; else None.

    Only if it trains with the same arithmetic and batch as the winner.
    """
    job, chosen = problem.job, winner.strategy
    if current.devices != chosen.devices or any(
        getattr(current, name) != getattr(chosen, name) for name in _NOT_SEARCHED
    ):
        return None
    if job.global_batch is not None and job.tokens_per_step(current) != job.global_batch:
        return None
    priced = price_one(problem, units, current)
    fits = priced.needed_bytes <= found.limit_bytes
    slower = priced.tokens_per_s < (1 - comparison_error()) * winner.tokens_per_s
    return priced if fits and not slower else None


# Settings that a search takes from the question.
_NOT_SEARCHED = (
    *("param_dtype", "reduce_dtype", "master_dtype", "low_bit_gather"),
    *("compile", "compress", "offload", "attention", "context_method", "dispatch"),
)


def _smaller_micro_batches(strategy: Strategy, space: Space, example: int) -> tuple[int, ...]:
    """The micro-batch halved as often as it divides evenly."""
    sizes: list[int] = []
    size = strategy.micro_batch
    while size % 2 == 0 and (size // 2) % example == 0:
        size //= 2
        if space.micro_batches is None or size in space.micro_batches:
            sizes.append(size)
    return tuple(sizes)


def _most_tokens_per_s(search: Search, best: Candidate) -> float:
    """Tokens/s of a configuration if it neither recomputed nor waited for communication."""
    strategy = best.strategy.but(recompute="none")
    priced = best
    if strategy != best.strategy:
        priced = price_one(search.problem, search.units, strategy)
    return priced.tokens_per_s * priced.step_s / (priced.step_s - priced.exposed_s)


def _probed_space(space: Space, strategy: Strategy, micro_batches: tuple[int, ...]) -> Space:
    """The space reduced to the strategy's degrees, these micro-batches and less recomputation."""
    less = tuple(p for p in space.recompute if p in PROBED and p != "full")
    return space.quick()._replace(
        recompute=less or space.recompute,
        micro_batches=micro_batches,
        losses=(strategy.loss,),
        tensor=(strategy.tensor,),
        context=(strategy.context,),
        expert=(strategy.expert,),
    )
