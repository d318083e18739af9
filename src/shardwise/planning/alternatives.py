"""Alternatives for a job that does not fit or leaves little memory free.

Smaller optimizer states, adapters, states in bf16, and what can be in host memory, each with its
predicted speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shardwise.planning.layout import UNDIVIDED
from shardwise.planning.price import price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.reasons.limits import Alternative
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import predict_memory
from shardwise.predict.rates import comparison_error
from shardwise.spec.adapter import Adapter, Stored, read_adapter
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer import SMALLER_VARIANTS, Optimizer
from shardwise.spec.optimizer_sharding import STOCHASTIC
from shardwise.spec.record import SpecError
from shardwise.spec.states import offload_option, read_states

# An alternative must save at least this share of the needed memory to be shown.
MIN_SAVED = 0.05
ADAPTERS = ("lora:16", "qlora:16")
# What to offload, the least bytes over the host link first.
OFFLOADS: tuple[bool | str, ...] = (
    "activations",
    "optimizer",
    "optimizer+activations",
    True,
    "parameters+activations",
)


def alternatives(problem: Problem, space: Space, winner: Candidate | None) -> list[Alternative]:
    """Alternatives that fit, the fastest first; each is the best of its own search.

    Adapters come last where all weights were to be trained: they train something else. With a
    winner, only alternatives that need clearly less memory or are clearly faster.
    """
    found = [
        *_with_smaller_states(problem, space, winner),
        *_with_bf16_states(problem, space, winner),
        *_with_adapters(problem, space, winner),
        *_offload_alternative(problem, space, winner),
    ]
    if winner is not None:
        smaller = (1 - MIN_SAVED) * winner.needed_bytes
        faster = (1 + comparison_error()) * winner.tokens_per_s
        found = [a for a in found if a.needed_bytes <= smaller or a.tokens_per_s >= faster]
    trains_all = problem.model.adapter is None
    return sorted(found, key=lambda a: (trains_all and a.change == "adapter", -a.tokens_per_s))


def winner_with_smaller_states(
    problem: Problem, units: Units, space: Space, winner: Candidate
) -> Iterator[Alternative]:
    """The winner with smaller optimizer states, if states are its largest memory term."""
    optimizer = _smaller_optimizer(problem, space)
    if optimizer is None or _largest_term(problem, units, winner) != "optimizer":
        return
    if not space.trains(optimizer, winner.strategy):
        return
    other = problem._replace(job=problem.job.but(optimizer=optimizer))
    best = price_one(other, units, winner.strategy)
    if winner.needed_bytes - best.needed_bytes > MIN_SAVED * winner.needed_bytes:
        yield _alternative("optimizer", optimizer, best, winner)


def _with_smaller_states(
    problem: Problem, space: Space, winner: Candidate | None
) -> Iterator[Alternative]:
    """The best configuration with smaller optimizer states, if one fits."""
    optimizer = _smaller_optimizer(problem, space)
    if optimizer is None:
        return
    other = problem._replace(job=problem.job.but(optimizer=optimizer))
    best = _best_candidate(other, space)
    if best is not None:
        yield _alternative("optimizer", optimizer, best, winner)


def _smaller_optimizer(problem: Problem, space: Space) -> Optimizer | None:
    """The variant of the job's optimizer with smaller states; None if there is none."""
    optimizer = SMALLER_VARIANTS.get(problem.job.optimizer)
    if optimizer is None or (space.has_optimizer and not space.has_optimizer(optimizer)):
        return None
    return optimizer


def _with_adapters(
    problem: Problem, space: Space, winner: Candidate | None
) -> Iterator[Alternative]:
    """The best configuration with each adapter, if one fits."""
    # A model that is not a ModelSpec would be traced again, which takes seconds.
    if not isinstance(problem.model, ModelSpec):
        return
    for adapter in smaller_adapters(problem.model.adapter):
        within = space.adapted(adapter) if space.adapted else (problem.base, space)
        if within is None:
            continue
        model = problem.model.but(adapter=space.stored(adapter))
        best = _best_candidate(problem._replace(model=model, base=within[0]), within[1])
        if best is not None:
            yield _alternative("adapter", str(adapter), best, winner)


def smaller_adapters(own: Adapter | None) -> list[Adapter]:
    """Adapters that need less memory: a job's own on a smaller base, or those of a job without."""
    if own is None:
        return [read_adapter(text) for text in ADAPTERS]
    if own.rank is None or own.quantised:
        return []
    bases: tuple[Stored, ...] = ("nf4",) if own.base in ("bf16", "fp16") else ("bf16", "nf4")
    return [own.but(base=base) for base in bases]


def _with_bf16_states(
    problem: Problem, space: Space, winner: Candidate | None
) -> Iterator[Alternative]:
    """The best configuration with states in bf16 and stochastic rounding, if one fits."""
    base = problem.base
    # A stack is asked for its own dtypes; an adapter's states are small.
    if space.for_stack or base.master_dtype != "fp32" or problem.model.adapter is not None:
        return
    if base.param_dtype != "bf16" or problem.job.optimizer not in STOCHASTIC:
        return
    undivided = base.unplaced().but(**UNDIVIDED.fields, **read_states("bf16+stochastic"))
    within = problem._replace(base=undivided)
    best = _best_candidate(within, space)
    if best is not None:
        yield _alternative("states", "bf16+stochastic", best, winner)


def _offload_alternative(
    problem: Problem, space: Space, winner: Candidate | None
) -> Iterator[Alternative]:
    """The fastest configuration with something in host memory, if one fits; none on CPUs.

    Of equally fast ones the first of OFFLOADS.
    """
    if problem.cluster.device.is_cpu or space.offload:
        return
    fastest: tuple[Candidate, bool | str] | None = None
    for offload in OFFLOADS:
        within = space.offloading(offload)
        # Whether the smallest fits is known soon.
        if _best_candidate(problem, within.least_memory()) is None:
            continue
        best = _best_candidate(problem, within)
        if best and (fastest is None or best.tokens_per_s > fastest[0].tokens_per_s):
            fastest = best, offload
    if fastest is None:
        return
    best, offload = fastest
    units, columns = Units(problem).of(best.strategy), Configurations.of([best.strategy])
    host = predict_memory(units, columns, problem.job.optimizer).host_bytes[0]
    yield _alternative("offload", offload_option(offload), best, winner, float(host))


def _best_candidate(problem: Problem, space: Space) -> Candidate | None:
    """The choice of a quick search; None if no configuration fits or the input is invalid."""
    try:
        return Search(problem, space.quick()).run().best()
    except SpecError:
        # Adapters exclude tensor and context parallelism, which the batch may need.
        return None


def _alternative(
    change: Literal["optimizer", "adapter", "states", "offload"],
    value: str,
    best: Candidate,
    winner: Candidate | None,
    host_bytes: float | None = None,
) -> Alternative:
    return Alternative(
        change=change,
        value=value,
        strategy=best.strategy,
        tokens_per_s=best.tokens_per_s,
        step_s=best.step_s,
        needed_bytes=best.needed_bytes,
        host_bytes=host_bytes,
        throughput=best.tokens_per_s / winner.tokens_per_s - 1 if winner else None,
    )


def _largest_term(problem: Problem, units: Units, winner: Candidate) -> str:
    """Name of the largest memory term at the winner's peak."""
    columns = Configurations.of([winner.strategy])
    memory = predict_memory(units.of(winner.strategy), columns, problem.job.optimizer)
    terms = memory.terms_at_peak()
    return max(terms, key=lambda term: terms[term])
