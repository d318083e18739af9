"""Make a plan: apply the objective, search, and collect the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planning.accumulated import keeps_current, with_accumulation
from shardwise.planning.alternatives import alternatives, winner_with_smaller_states
from shardwise.planning.batches import UnevenBatchError
from shardwise.planning.choice import ClosestToFitting, SearchResult
from shardwise.planning.explain import limit_reasons, padding, reasons
from shardwise.planning.limits import Limits, limits_of
from shardwise.planning.money import Budget, SizeChoice, SizedCandidate, by_size, choose_size
from shardwise.planning.plan import Baseline, Objective, Plan
from shardwise.planning.price import price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.reasons.limits import (
    CompileGain,
    CompressionGain,
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
from shardwise.planning.untried import untried_parallelism
from shardwise.planning.warnings import fewer_devices, is_uneven, left_out_warning, warnings_of
from shardwise.planning.ways import Change, changes_to_fit
from shardwise.predict.intervals import after_a_step, error_interval, is_fitted, regime_of
from shardwise.predict.kernels import check_attention, check_products, coefficients_for, hardware_of
from shardwise.predict.rates import comparison_error
from shardwise.spec.catalogue import coefficient, figure
from shardwise.spec.compression import Compress
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

# The objective "memory" accepts configurations with at least this share of the best throughput.
FAST_ENOUGH = 0.9


# A tip for low-precision gradient reduction is given from this gain on.
MIN_REDUCE_GAIN = 0.01


# A tip for torch.compile is given above this gain.
MIN_COMPILE_GAIN = 0.01


def check_predictable(problem: Problem) -> None:
    """Raise SpecError if step times cannot be predicted: no network, no rates, no known peak."""
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
    check_attention(cluster, problem.base)


def make_plan(
    problem: Problem,
    *,
    objective: Objective = "throughput",
    space: Space | None = None,
    current: Strategy | None = None,
    budget: Budget | None = None,
    in_full: bool = True,
) -> Plan:
    """Search, choose by the objective, and collect the reasons.

    For the objective `sequence` the plan has its own sequence length, for `money` its own cluster.
    Without `in_full`, plans for other networks are left out; they take a third of the time.
    """
    check_predictable(problem)
    budget = (budget or Budget()).with_list_price(problem.cluster, asked=objective == "money")
    problem, aim, size_choice = _apply_objective(problem, objective, space, budget)
    search, found, warnings = _search(problem, space or Space(), current)
    search, found = with_accumulation(search, found)
    problem, units = search.problem, search.units
    winner, least = _winner(search, found, objective, current)
    aim = least or aim
    size_choice = _with_winner(size_choice, winner, budget)
    lacking = left_out_warning(problem, units, search.space, winner)
    withheld = lacking is not None and not lacking.recommended
    winner = None if withheld else winner
    warnings = [
        *filter(None, [lacking, *warnings]),
        *warnings_of(problem, units, search.space, found, winner, objective != "sequence"),
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
        limits_why=_limit_reasons(problem, objective, winner, limits),
        tips=[] if withheld else _tips(search, found, winner, objective),
        warnings=warnings,
        ways=[] if winner or withheld else _changes_to_fit(search, found),
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
    """Choose the size again, with the full search's winner as the chosen size's candidate.

    The chosen size is kept if it still meets the deadline; else the result has another size, or
    none. Without a chosen size or a winner, `choice` is returned as it is.
    """
    if choice is None or choice.chosen is None or winner is None:
        return choice
    chosen = choice.chosen
    sizes = [SizedCandidate(s.cluster, winner) if s is chosen else s for s in choice.sizes]
    return choose_size(sizes, budget, choice.all_devices, chosen.cluster.devices)


def _apply_objective(
    problem: Problem, objective: Objective, space: Space | None, budget: Budget
) -> tuple[Problem, Reason | None, SizeChoice | None]:
    """The problem with the sequence length or cluster that the objective decides, and the reasons.

    Raises SpecError if the budget has prices but none for this device.
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


def _search(
    problem: Problem, space: Space, current: Strategy | None
) -> tuple[Search, SearchResult, list[Reason]]:
    """The search, its outcome, and warnings.

    If the batch divides only over fewer devices, there are two ways to keep the batch: all devices,
    with groups that share sequences, or fewer devices. The faster one is returned, unless the
    current strategy already divides it over all devices.
    """
    search = Search(problem, space)
    divides = current is not None and current.devices == problem.cluster.devices
    if divides or not is_uneven(problem, space):
        return search, search.run(), []
    part = fewer_devices(problem, space)
    try:
        found: SearchResult | None = search.run()
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
        # Fewer devices with undivided sequences are simpler; preferred unless clearly slower.
        or (divided and (1 - comparison_error()) * divided.tokens_per_s >= best.tokens_per_s)
    ):
        return search, found, []
    return on_fewer, there, [part[1]]


def _winner(
    search: Search, found: SearchResult, objective: Objective, current: Strategy | None
) -> tuple[Candidate | None, LeastMemory | None]:
    """The recommended configuration, and the reason for the objective `memory`."""
    winner = found.best()
    if winner is None:
        return None, None
    if objective == "memory":
        return _least_memory(found)
    if current is not None and objective == "throughput":
        winner = keeps_current(search.problem, search.units, found, winner, current) or winner
    return winner, None


def _least_memory(found: SearchResult) -> tuple[Candidate, LeastMemory]:
    """The winner for the objective `memory`, and the reason.

    It needs the least memory of those with at least FAST_ENOUGH of the fastest throughput.
    """
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
    problem: Problem, units: Units, found: SearchResult, current: Strategy | None
) -> list[Baseline]:
    """Configurations to compare the plan with: the best DDP, and the current strategy if given."""
    baselines = []
    nearest, device = found.closest_of_kind("ddp"), problem.cluster.device
    if nearest is not None:
        best = found.best(kind="ddp")
        shown = best or nearest
        judged = "fits" if best else nearest.verdict(device)
        baselines.append(Baseline("ddp", shown.strategy, shown.needed_bytes, judged, best))
    # A strategy for another number of devices cannot be compared.
    if current is not None and problem.base.devices == problem.cluster.devices:
        priced = price_one(problem, units, current)
        judged = ClosestToFitting(current, priced.peak_bytes, priced.needed_bytes).verdict(device)
        fits = priced if judged == "fits" else None
        baselines.append(Baseline("now", current, priced.needed_bytes, judged, fits))
    return baselines


def _limit_reasons(
    problem: Problem, objective: Objective, winner: Candidate | None, limits: Limits | None
) -> list[Reason]:
    """The reasons about limits: what binds the winner, unless the objective is not speed; slack."""
    if winner is None or limits is None:
        return []
    binding, slack = limit_reasons(problem, winner, limits)
    # What limits the speed does not matter for these objectives.
    return [slack] if objective in ("memory", "sequence") else [binding, slack]


def _tips(
    search: Search, found: SearchResult, winner: Candidate | None, objective: Objective
) -> list[Reason]:
    """Tips: faster or smaller options that the search does not choose; or how to make it fit."""
    problem, units = search.problem, search.units
    tips: list[Reason] = list(_risky_alternative(problem, found, winner))
    if winner is None:
        return [*tips, *_tips_to_fit(search, found, objective)]
    if found.is_tight(winner):
        tips += alternatives(problem, search.space, winner)
    else:
        tips += winner_with_smaller_states(problem, units, search.space, winner)
    strategy = winner.strategy
    if strategy.sharded and strategy.reduce_dtype == "fp32" and strategy.param_dtype != "fp32":
        low = price_one(problem, units, strategy.but(reduce_dtype=strategy.param_dtype))
        gain = low.tokens_per_s / winner.tokens_per_s - 1
        if gain > MIN_REDUCE_GAIN:
            tips.append(LowPrecisionReduce(dtype=strategy.param_dtype, gain=gain))
    tips += _compression_tips(search, found, winner)
    return [*tips, *_compile_tip(problem, units, winner), *untried_parallelism(problem, winner)]


def _compression_tips(
    search: Search, found: SearchResult, winner: Candidate
) -> Iterator[CompressionGain]:
    """What DDP with compressed gradients gains where it is faster than the winner.

    It changes the arithmetic, so the search does not choose it. PowerSGD, which changes more, is
    named only where it gains more than bf16.
    """
    replicated, fastest = found.best(kind="ddp"), winner.tokens_per_s
    if replicated is None or replicated.strategy.compress is not None:
        return
    tried: tuple[Compress, ...] = ("bf16", "powersgd")
    for compress in tried:
        try:
            strategy = search.space.applied(replicated.strategy.but(compress=compress))
        except SpecError:
            continue
        if strategy.compress != compress:
            continue
        other = price_one(search.problem, search.units, strategy)
        fits = other.needed_bytes <= found.limit_bytes
        if fits and other.tokens_per_s > (1 + comparison_error()) * fastest:
            fastest = other.tokens_per_s
            gain = fastest / winner.tokens_per_s - 1
            yield CompressionGain(strategy=strategy, gain=gain, needed_bytes=other.needed_bytes)


def _compile_tip(problem: Problem, units: Units, winner: Candidate) -> Iterator[Reason]:
    """The gain of torch.compile for the winner, if it is not compiled and gains enough."""
    if winner.strategy.compile or not isinstance(problem.model, ModelSpec):
        return
    if winner.strategy.offloads("activations"):
        return
    other = price_one(problem, units, winner.strategy.but(compile=True))
    gain = other.tokens_per_s / winner.tokens_per_s - 1
    if gain > MIN_COMPILE_GAIN:
        yield CompileGain(
            gain=gain,
            saved_bytes=winner.needed_bytes - other.needed_bytes,
            runs=round(figure("compiled_runs")),
        )


def _tips_to_fit(search: Search, found: SearchResult, objective: Objective) -> list[Reason]:
    """Tips for when no configuration fits: causes, and alternatives that fit."""
    problem = search.problem
    return [
        *_gradients_unsharded(problem, search.units, found),
        *_why_nothing_fits(search, found, objective),
        *alternatives(problem, search.space, None),
        *untried_parallelism(problem, None),
    ]


def _gradients_unsharded(problem: Problem, units: Units, found: SearchResult) -> Iterator[Reason]:
    """The memory that unsharded gradients cost the configuration closest to fitting, if any."""
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


def _why_nothing_fits(
    search: Search, found: SearchResult, objective: Objective
) -> Iterator[Reason]:
    """Padding of the configuration closest to fitting, and a shorter sequence that would fit."""
    if found.nearest:
        nearest = min(found.nearest.values(), key=lambda n: n.needed_bytes)
        yield from padding(search, nearest.strategy)
    shorter = longest(search.problem, search.space) if objective != "sequence" else None
    if shorter is not None and shorter.tokens < search.problem.job.seq_len:
        yield ShorterFits(tokens=shorter.tokens)


def _risky_alternative(
    problem: Problem, found: SearchResult, winner: Candidate | None
) -> Iterator[RiskyAlternative]:
    """The best configuration that fits if the allocator wastes as usual rather than the maximum.

    Only if it exceeds the usable memory and is clearly faster than the winner.
    """
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


def _changes_to_fit(search: Search, found: SearchResult) -> list[Change]:
    """Changes of settings or devices that make the configuration closest to fitting fit."""
    if not found.nearest:
        return []
    nearest = min(found.nearest.values(), key=lambda n: n.needed_bytes)
    return changes_to_fit(search.problem, nearest.strategy, search.space, search.units)
