"""The reasons for a choice: what was compared, and the numbers that decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.planning.batches import (
    LARGE_BATCH,
    USUAL_BATCH,
    USUAL_MICRO_BATCH,
    distance,
    usual_sizes,
)
from shardwise.planning.choice import SearchResult, group_rank
from shardwise.planning.degrees import of_groups
from shardwise.planning.layout import Layout
from shardwise.planning.limits import Limits, crossover, link_crossover
from shardwise.planning.price import price_one
from shardwise.planning.problem import Problem, Units, steps, times
from shardwise.planning.reasons.layout import (
    Compared,
    DecidedBy,
    Difference,
    Divided,
    DoesNotFit,
    LinkCrossover,
    NetworkCrossover,
    Padding,
    Setting,
    SingleDevice,
    StatesFit,
    UndividedExperts,
)
from shardwise.planning.reasons.limits import LimitedBy, Slack
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.reasons.settings import (
    BatchCapped,
    ChunkedLoss,
    DataParallelEnds,
    FusedLoss,
    LargeBatch,
    MicroBatchGain,
    NoRecompute,
    Recomputes,
    RootSplit,
    StepBatch,
)
from shardwise.planning.rows import Candidate, complexity
from shardwise.planning.search import Search
from shardwise.predict.configurations import Configurations
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.rates import comparison_error
from shardwise.spec.mesh import INNER_AXES
from shardwise.spec.strategy import Strategy

# Settings named when two configurations are compared, besides their layout; and usual values.
COMPARED_SETTINGS: tuple[Setting, ...] = (
    *("recompute", "micro_batch"),
    *("prefetch", "forward_prefetch", "blocks_per_unit", "grad_sync", "reshard_after_forward"),
    "loss",
)
USUAL_SETTINGS: dict[Setting, int] = {"prefetch": 1, "forward_prefetch": 0, "blocks_per_unit": 1}
# Padding below this share is not reported.
MIN_PADDING = 0.05
# Saved memory below this share of the usable memory is not reported.
MIN_SAVED = 0.01
# Throughputs that differ by less than this share are shown as equal.
MIN_DIFFERENCE = 0.0005
# The gain of a larger micro-batch is reported from this share on.
MIN_MICRO_BATCH_GAIN = 0.005


def reasons(
    search: Search,
    found: SearchResult,
    winner: Candidate,
    by_speed: bool = True,
    crossovers: bool = True,
) -> list[Reason]:
    """The reasons for the winner: layout, crossovers, recompute, loss, split root, batch.

    They are in this order. `by_speed` is false if the objective is not throughput: then faster
    layouts lost to the objective, and there are no crossovers. `crossovers` adds the bandwidths at
    which the layout would change; finding them takes a third of a plan's time.
    """
    problem, units = search.problem, search.units
    layout = list(_layout_reasons(search, found, winner, by_speed))
    if not by_speed:
        layout = [_decided_by_objective(reason) for reason in layout]
    return [
        *layout,
        *(_crossovers(search, winner) if by_speed and crossovers else ()),
        _recompute_reason(problem, units, found, winner),
        *_loss_reasons(problem, units, found, winner),
        *_split_root(problem, units, found, winner),
        *_batch_reasons(search, winner),
    ]


def _decided_by_objective(reason: Reason) -> Reason:
    """The reason, with the objective as what decided against a faster layout."""
    if isinstance(reason, Compared) and reason.decided_by is not None:
        return replace(reason, decided_by="objective")
    return reason


def relative_throughput(other: Candidate, winner: Candidate) -> float:
    """Throughput of another candidate relative to the winner: -0.1 is 10 % slower."""
    return other.tokens_per_s / winner.tokens_per_s - 1


def _layout_reasons(
    search: Search, found: SearchResult, winner: Candidate, by_speed: bool
) -> Iterator[Reason]:
    """Reasons for the winner's layout, compared with other kinds, degrees and groups."""
    layout = winner.layout
    if layout.kind == "single":
        yield SingleDevice()
        return
    if layout.kind == "ddp" and not layout.is_divided:
        units, columns = search.units.of(winner.strategy), Configurations.of([winner.strategy])
        sizes = Sizes(units, columns, search.problem.job.optimizer)
        yield StatesFit(state_bytes=float(sizes.state_bytes[0]))
        sharded = [c for c in found.layouts() if c.strategy.sharded]
        if sharded:
            yield _comparison_with(search, found, "sharded", sharded[0], winner)
        return
    if layout.is_divided:
        yield from _division_reasons(search, found, winner, by_speed)
    if layout.mesh.states * layout.mesh.replicate == 1:
        return  # one copy of the data: all kinds are the same
    replicated = layout.mesh._replace(replicate=layout.mesh.data_parallel, shard=1)
    yield from _compare_layout(search, found, winner, Layout("ddp", replicated), "replicated")
    if layout.kind == "zero3":
        yield from _compare_layout(search, found, winner, layout.as_kind("zero2"), "gathered once")
    else:
        rival = found.best(layout.as_kind("zero3"))
        if rival is not None:
            yield _comparison_with(search, found, "gathered twice", rival, winner)
    yield from _group_reasons(search, found, winner, by_speed)
    divided = [c for c in found.layouts() if c.layout.is_divided]
    if divided and not layout.is_divided:
        yield _comparison_with(search, found, "divided", divided[0], winner)
    yield from _undivided_experts(search, winner)
    yield from padding(search, winner.strategy)


def _undivided_experts(search: Search, winner: Candidate) -> Iterator[Reason]:
    """Why no expert degree was priced: the bound of the best is not above the winner."""
    bounds = {one.expert: most for one, most in search.bounds.items() if one.expert > 1}
    if bounds and not any(layout.expert > 1 for layout in search.nearest):
        best = max(bounds, key=lambda degree: bounds[degree])
        yield UndividedExperts(expert=best, throughput=bounds[best] / winner.tokens_per_s - 1)


def _same_degrees(one: Candidate, other: Candidate) -> bool:
    """Whether both have the same tensor, context and expert degrees."""
    first, second = one.strategy, other.strategy
    return all(getattr(first, axis) == getattr(second, axis) for axis in INNER_AXES)


def _division_reasons(
    search: Search, found: SearchResult, winner: Candidate, by_speed: bool
) -> Iterator[Reason]:
    """Why the winner uses tensor, context or expert parallelism, and the best other degrees."""
    strategy, problem = winner.strategy, search.problem
    undivided = next((c for c in found.layouts() if not c.layout.is_divided), None)
    nearest = [n.needed_bytes for one, n in found.nearest.items() if not one.is_divided]
    cluster = problem.cluster
    priced = steps(search.units.of(strategy), Configurations.of([strategy]), problem)
    times_found = times(priced, cluster, strategy.param_dtype)
    spans = {axis: getattr(strategy, axis) * strategy.stride(axis) for axis in INNER_AXES}
    yield Divided(
        strategy=strategy,
        usable_bytes=found.limit_bytes,
        sequences=None if nearest else problem.job.sequences / cluster.devices,
        undivided=undivided.strategy if undivided else None,
        throughput=relative_throughput(undivided, winner) if undivided else 0.0,
        lacks_headroom=undivided is not None
        and found.is_tight(undivided)
        and not found.is_tight(winner),
        needed_undivided_bytes=min(nearest) if nearest and not undivided else None,
        shares={
            axis: float(times_found.inside_s[axis][0]) / winner.step_s
            for axis in INNER_AXES
            if getattr(strategy, axis) > 1
        },
        across_nodes=tuple(axis for axis in INNER_AXES if spans[axis] > cluster.devices_per_node),
    )
    others = [c for c in found.layouts() if c.layout.is_divided and not _same_degrees(c, winner)]
    roomy = [c for c in others if found.is_tight(winner) or not found.is_tight(c)]
    if others:
        yield _comparison_with(search, found, "divided otherwise", (roomy or others)[0], winner)


def _compare_layout(
    search: Search, found: SearchResult, winner: Candidate, layout: Layout, difference: Difference
) -> Iterator[Reason]:
    """How another layout compares with the winner, or that this layout does not fit."""
    best, nearest = found.best(layout), found.nearest.get(layout)
    if best is not None:
        yield _comparison_with(search, found, difference, best, winner)
    elif nearest is not None and nearest.needed_bytes > found.limit_bytes:
        yield DoesNotFit(
            strategy=nearest.strategy,
            verdict=nearest.verdict(search.problem.cluster.device),
            needed_bytes=nearest.needed_bytes,
            usable_bytes=found.limit_bytes,
        )


def _comparison_with(
    search: Search, found: SearchResult, difference: Difference, other: Candidate, winner: Candidate
) -> Compared:
    """Another layout compared with the winner: speed, settings that differ, and what decided."""
    throughput = relative_throughput(other, winner)
    own = {name: getattr(winner.strategy, name) for name in COMPARED_SETTINGS}
    differing = tuple(n for n in COMPARED_SETTINGS if getattr(other.strategy, n) != own[n])
    unusual = {
        n: USUAL_SETTINGS[n]
        for n in differing
        if n in USUAL_SETTINGS and getattr(other.strategy, n) != USUAL_SETTINGS[n]
    }
    needs = False
    if unusual and throughput < 0:
        usual = price_one(search.problem, search.units, other.strategy.but(**unusual))
        needs = usual.needed_bytes > found.limit_bytes
    decided_by = None
    if throughput > MIN_DIFFERENCE:
        decided_by = _decided_by(search, found, other, winner)
    gathers = [c.strategy.accumulate for c in (other, winner) if c.layout.kind == "zero3"]
    return Compared(
        difference=difference,
        strategy=other.strategy,
        throughput=throughput,
        too_close=abs(throughput) <= comparison_error(),
        differing=differing,
        fits_only_so=needs,
        gathers=2 * gathers[0]
        if gathers and difference in ("gathered once", "gathered twice")
        else None,
        decided_by=decided_by,
        more_bytes=other.needed_bytes - winner.needed_bytes if decided_by else None,
    )


def _decided_by(
    search: Search, found: SearchResult, other: Candidate, winner: Candidate
) -> DecidedBy:
    """Which part of the choice rule decided against `other`, which is faster than the winner."""
    sequences = [c.strategy.micro_batch * c.strategy.accumulate for c in (other, winner)]
    groups = np.asarray([c.strategy.data_parallel for c in (other, winner)])
    away = distance(np.asarray(sequences), groups, search.problem.job)
    if away[0] > away[1]:
        return "batch"
    headroom = [found.headroom(c) for c in (other, winner)]
    if headroom[0] < headroom[1]:
        return "headroom"
    score = [
        complexity(c.strategy, c.strategy.recompute, c.strategy.accumulate > 1)
        for c in (other, winner)
    ]
    if score[0] > score[1]:
        return "simplicity"
    inner = [c.layout.mesh.inner for c in (other, winner)]
    if score[0] == score[1] and inner[0] > inner[1]:
        return "fewer devices per sequence"
    if other.needed_bytes <= winner.needed_bytes:
        return "smaller groups"
    # A third configuration, as simple, was faster and smaller than `other`.
    return "memory"


def _group_reasons(
    search: Search, found: SearchResult, winner: Candidate, by_speed: bool
) -> Iterator[Reason]:
    """Why states are sharded over groups or over all devices; nothing on a single node."""
    layout, cluster = winner.layout, search.problem.cluster
    if cluster.nodes == 1 or cluster.network is None:
        return
    alike = [c for c in found.layouts() if _same_degrees(c, winner)]
    if winner.strategy.hybrid:
        flat = [c for c in alike if c.strategy.sharded and not c.strategy.hybrid]
        if flat:
            yield _comparison_with(search, found, "over all devices", flat[0], winner)
        else:
            yield from _compare_layout(
                search, found, winner, layout.over_all_devices(), "over all devices"
            )
    else:
        rivals = [c for c in alike if c.strategy.hybrid]
        # Groups of one node differ most from sharding over all devices.
        node = cluster.devices_per_node
        smallest = min(rivals, key=lambda c: group_rank(c.layout, node), default=None)
        if smallest is not None:
            yield _comparison_with(search, found, "in groups", smallest, winner)


def _crossovers(search: Search, winner: Candidate) -> Iterator[Reason]:
    """The bandwidths at which other degrees, or other sharding groups, would be chosen."""
    layout, cluster = winner.layout, search.problem.cluster
    turn = link_crossover(search, winner) if layout.is_divided else None
    if turn is not None:
        link = cluster.device.link_bandwidth * turn.factor
        yield LinkCrossover(link=float(f"{link:.2g}"), layout=turn.choice.layout)
    shards = winner.strategy.sharded and layout.mesh.states * layout.mesh.replicate > 1
    if shards and cluster.nodes > 1 and cluster.network is not None:
        turn = crossover(search, winner)
        if turn is not None:
            yield NetworkCrossover(
                network=_round_rate(cluster.network * turn.factor),
                direction="above" if winner.strategy.hybrid else "below",
                layout=turn.choice.layout,
            )


def _round_rate(rate: float) -> float:
    """A rate in bytes/s, rounded to two digits in bits/s: the precision of a crossover."""
    return float(f"{rate * 8:.2g}") / 8


def padding(search: Search, strategy: Strategy) -> Iterator[Reason]:
    """The share of padding in sharded memory, if it is at least MIN_PADDING.

    Tensors with fewer rows than devices are padded, such as experts stored as rows.
    """
    units, mesh = search.units.of(strategy), strategy.mesh
    devices = mesh.devices // mesh.tensor
    share = 1 - units.numel / sum(unit.padded_numel(devices) for unit in units.units)
    if share >= MIN_PADDING:
        yield Padding(devices=devices, share=share)


def _recompute_reason(
    problem: Problem, units: Units, found: SearchResult, winner: Candidate
) -> Reason:
    """Why the winner recomputes and what that costs, or that it does not."""
    strategy = winner.strategy
    if strategy.recompute == "none":
        return NoRecompute()
    kept = price_one(problem, units, strategy.but(recompute="none"))
    return Recomputes(
        strategy=strategy,
        needed_bytes=winner.needed_bytes,
        needed_without_bytes=kept.needed_bytes,
        usable_bytes=found.limit_bytes,
        share_of_step=max(0.0, 1 - kept.step_s / winner.step_s),
    )


def _loss_reasons(
    problem: Problem, units: Units, found: SearchResult, winner: Candidate
) -> Iterator[Reason]:
    """The memory that a chunked or fused loss saves, if the winner has one."""
    strategy = winner.strategy
    if strategy.loss == "plain" or not units.can_chunk:
        return
    plain = price_one(problem, units, strategy.but(loss="plain"))
    sizes: dict[str, Any] = {
        "needed_bytes": winner.needed_bytes,
        "needed_plain_bytes": plain.needed_bytes,
        "usable_bytes": found.limit_bytes,
    }
    if strategy.loss == "chunked":
        yield ChunkedLoss(chunks=strategy.loss_chunks, **sizes)
    else:
        yield FusedLoss(kernel=strategy.loss_kernel, **sizes)


def _split_root(
    problem: Problem, units: Units, found: SearchResult, winner: Candidate
) -> Iterator[Reason]:
    """The memory saved by embedding and head as separate units, if it is worth reporting."""
    if winner.strategy.split_root:
        joined = price_one(problem, units, winner.strategy.but(split_root=False))
        saved = joined.needed_bytes - winner.needed_bytes
        if saved >= MIN_SAVED * found.limit_bytes:
            yield RootSplit(saved_bytes=saved)


def _batch_reasons(search: Search, winner: Candidate) -> Iterator[Reason]:
    """Reasons for the batch: its factors, the gain of the micro-batch, and limits."""
    problem, units = search.problem, search.units
    strategy, job = winner.strategy, problem.job
    ranks, sequences = strategy.data_parallel, strategy.micro_batch * strategy.accumulate
    tokens = job.tokens_per_step(strategy)
    yield StepBatch(
        tokens=tokens,
        data_parallel=ranks,
        micro_batch=strategy.micro_batch,
        accumulate=strategy.accumulate,
        seq_len=job.seq_len,
        inner=strategy.mesh.inner,
        asked=job.global_batch,
    )
    smaller = strategy.micro_batch // 2
    if job.global_batch is None and smaller >= 1:
        half = price_one(problem, units, strategy.but(micro_batch=smaller))
        gain = winner.tokens_per_s / half.tokens_per_s - 1
        if gain >= MIN_MICRO_BATCH_GAIN:
            yield MicroBatchGain(micro_batch=strategy.micro_batch, smaller=smaller, gain=gain)
    most = USUAL_BATCH if job.global_batch is None else LARGE_BATCH
    if tokens > most:
        yield LargeBatch(tokens=tokens, limit_tokens=most)
    elif job.global_batch is None:
        sizes = usual_sizes(job, of_groups(problem.cluster, strategy.mesh.inner))
        if strategy.micro_batch == sizes[-1]:
            yield BatchCapped(limit_tokens=USUAL_BATCH, micro_batch_tokens=USUAL_MICRO_BATCH)
    if sequences == 1 and ranks > 1 and job.global_batch is not None:
        inner = strategy.mesh.inner
        yield DataParallelEnds(devices=strategy.devices, tokens=tokens, inner=inner)


def limit_reasons(problem: Problem, winner: Candidate, limits: Limits) -> list[Reason]:
    """Two reasons: what limits the winner, and its slack in memory and network."""
    device, devices = problem.cluster.device, winner.strategy.devices
    here = "link between processes" if device.is_cpu else device.link
    link = "network" if problem.cluster.nodes > 1 else here
    changed, planned = limits.with_memory, limits.with_network
    latency = limits.waiting_without_latency if limits.binding == "latency" else None
    return [
        LimitedBy(
            binding=limits.binding,
            link=link,
            binding_link=here if limits.link_binds else link,
            devices=devices,
            # The exposed time is a difference and can be slightly negative by rounding.
            waiting_share=max(0.0, winner.exposed_s) / winner.step_s,
            twice_network=limits.twice_network,
            inner_link=here if problem.cluster.nodes > 1 else "",
            twice_link=limits.twice_link,
            with_network=planned.strategy if planned else None,
            planned_again=relative_throughput(planned, winner) if planned else 0.0,
            waiting_without_latency=latency,
            more_memory=limits.more_memory,
            with_memory=changed.strategy if changed and changed != winner else None,
            optimizer_share=winner.optimizer_s / winner.step_s,
            larger_batch=limits.larger_batch,
        ),
        Slack(
            free_bytes=limits.free_bytes,
            link=link,
            devices=devices,
            network_factor=limits.network_slack,
        ),
    ]
