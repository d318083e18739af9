"""Every reason of a plan agrees with the plan's own rows and with pricing the strategies again."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.brute_force import ALLOWED, compare, random_problem, random_problems
from shardwise.planning.batches import BATCH_TOLERANCE, LARGE_BATCH, USUAL_BATCH
from shardwise.planning.limits import MIN_GAIN
from shardwise.planning.make import make_plan
from shardwise.planning.plan import Plan
from shardwise.planning.price import price_one, scaled_link, scaled_network
from shardwise.planning.reasons.layout import (
    Compared,
    Divided,
    DoesNotFit,
    LinkCrossover,
    NetworkCrossover,
    Padding,
    SingleDevice,
    StatesFit,
    UndividedExperts,
)
from shardwise.planning.reasons.limits import (
    Alternative,
    CompileGain,
    CompressionGain,
    GradientsUnsharded,
    LimitedBy,
    LowPrecisionReduce,
    OtherParallelism,
    RiskyAlternative,
    ShorterFits,
    Slack,
)
from shardwise.planning.reasons.reason import Reason, share_words, speed_words
from shardwise.planning.reasons.settings import (
    BatchCapped,
    ChunkedLoss,
    DataParallelEnds,
    LargeBatch,
    MicroBatchGain,
    NoRecompute,
    Recomputes,
    RootSplit,
    StepBatch,
)
from shardwise.planning.reasons.warnings import (
    FewerDevices,
    Fragile,
    LeastMemory,
    NoPeerToPeer,
    OnlyReplicated,
    UnfittedDevice,
    UnfittedExperts,
)
from shardwise.planning.rows import Candidate, complexity
from shardwise.planning.search import Search
from shardwise.predict.intervals import RUNS_WITH_EXPERTS
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from tests.examples import examples


def again(plan: Plan, strategy: Strategy) -> Candidate:
    return price_one(plan.problem, plan.units, strategy)


def check_layout(plan: Plan, winner: Candidate, reason: Reason) -> bool:
    """The layout and recomputation, priced again. False for reasons of another kind."""
    devices = plan.problem.cluster.devices
    words = reason.words(plan.units.blocks)
    match reason:
        case SingleDevice():
            assert devices == 1
        case StatesFit(state_bytes=size):
            assert winner.strategy.kind == "ddp"
            assert size <= winner.peak_bytes
        case DoesNotFit(strategy=strategy, needed_bytes=needed, usable_bytes=usable):
            assert again(plan, strategy).needed_bytes == pytest.approx(needed)
            assert needed > usable == plan.limit_bytes
            assert not any(c.layout == again(plan, strategy).layout for c in plan.layouts)
        case Padding(share=share):
            assert 0.05 <= share < 1
            assert f"{share:.0%}" in words
        case NoRecompute():
            assert winner.strategy.recompute == "none"
        case Recomputes():
            kept = again(plan, winner.strategy.but(recompute="none"))
            assert reason.needed_without_bytes == pytest.approx(kept.needed_bytes)
            assert reason.share_of_step == pytest.approx(
                max(0.0, 1 - kept.step_s / winner.step_s), abs=1e-9
            )
            assert ("usable" in words) == (kept.needed_bytes > plan.limit_bytes)
        case NetworkCrossover(network=network, direction=direction):
            here = plan.problem.cluster.network
            assert here is not None
            # Rounded to two digits: at most a factor of 1.05 off.
            assert network <= here * 1.05 if direction == "below" else network >= here / 1.05
            assert reason.layout != winner.layout
        case UndividedExperts(expert=expert, throughput=throughput):
            assert winner.strategy.expert == 1 < expert
            # Beyond the error of comparison it would have been tried.
            fastest = max(c.tokens_per_s for c in plan.layouts) / winner.tokens_per_s
            assert throughput <= fastest * (1 + plan.comparison_error) - 1 + 1e-9
        case Divided() | LinkCrossover():
            check_divided(plan, winner, reason)
        case CompressionGain(strategy=strategy, gain=gain):
            compressed = again(plan, strategy)
            assert gain == pytest.approx(compressed.tokens_per_s / winner.tokens_per_s - 1)
            assert gain > 0.01
            assert reason.needed_bytes == pytest.approx(compressed.needed_bytes)
            assert reason.needed_bytes <= plan.limit_bytes
            plain = again(plan, strategy.but(compress=None))
            assert plain.tokens_per_s < compressed.tokens_per_s
            assert share_words(gain) in words
        case _:
            return False
    return True


def check_divided(plan: Plan, winner: Candidate, reason: Divided | LinkCrossover) -> None:
    """Why devices share sequences, and what it costs."""
    assert winner.layout.is_divided
    cluster, job = plan.problem.cluster, plan.problem.job
    if isinstance(reason, LinkCrossover):
        # Rounded to two digits: at most a factor of 1.05 off.
        assert reason.link <= cluster.device.link_bandwidth * 1.05
        mesh, own = reason.layout.mesh, winner.layout.mesh
        other = (mesh.tensor, mesh.context, reason.layout.expert)
        assert other != (own.tensor, own.context, winner.layout.expert)
        return
    for axis, share in reason.shares.items():
        assert getattr(winner.strategy, axis) > 1
        assert 0 < share < 1
    undivided = [c for c in plan.layouts if not c.layout.is_divided]
    if reason.sequences is not None:
        assert reason.sequences == pytest.approx(job.sequences / cluster.devices)
        # Not so many that they divide over all devices.
        assert reason.sequences < 1 or abs(reason.sequences / round(reason.sequences) - 1) > 0.04
    elif reason.undivided is not None:
        best = max(c.tokens_per_s for c in undivided)
        assert reason.throughput == pytest.approx(best / winner.tokens_per_s - 1)
    else:
        assert not undivided
        assert (reason.needed_undivided_bytes or 0) > plan.limit_bytes


def check_compared(plan: Plan, winner: Candidate, reason: Reason) -> bool:
    """Another layout against its row of the table. False for reasons of another kind."""
    words = reason.words(plan.units.blocks)
    match reason:
        case Compared(strategy=strategy, throughput=throughput):
            rival = again(plan, strategy)
            assert rival.needed_bytes <= plan.limit_bytes
            row = next(c for c in plan.layouts if c.layout == rival.layout)
            assert row.strategy == strategy
            ratio = row.tokens_per_s / winner.tokens_per_s - 1
            assert throughput == pytest.approx(ratio, abs=1e-9)
            assert rival.tokens_per_s / winner.tokens_per_s - 1 == pytest.approx(ratio, abs=1e-6)
            assert reason.too_close == (abs(throughput) <= plan.comparison_error)
            assert (speed_words(throughput) in words) == (not reason.too_close)
            assert (reason.decided_by is not None) == (throughput > 0.0005)
            for name in ("recompute", "micro_batch"):
                differs = getattr(strategy, name) != getattr(winner.strategy, name)
                assert (name in reason.differing) == differs
        case _:
            return False
    return True


def check_batch(plan: Plan, winner: Candidate, reason: Reason) -> bool:
    """Tokens per step, from their factors. False for reasons of another kind."""
    job = plan.problem.job
    devices, groups = plan.problem.cluster.devices, winner.strategy.data_parallel
    words = reason.words(plan.units.blocks)
    match reason:
        case StepBatch():
            strategy = winner.strategy
            product = strategy.micro_batch * strategy.accumulate * groups * job.seq_len
            assert reason.tokens == product
            assert winner.tokens_per_s * winner.step_s == pytest.approx(product)
            assert f"{product:,}" in words
            if job.global_batch is not None and product != job.global_batch:
                assert f"{job.global_batch:,}" in words
                assert abs(reason.deviation) <= BATCH_TOLERANCE + 1e-9
        case MicroBatchGain(smaller=smaller, gain=gain):
            half = again(plan, winner.strategy.but(micro_batch=smaller))
            assert gain == pytest.approx(winner.tokens_per_s / half.tokens_per_s - 1, abs=1e-9)
            assert share_words(gain) in words
        case BatchCapped(limit_tokens=limit):
            assert job.global_batch is None
            assert job.tokens_per_step(winner.strategy) <= limit == USUAL_BATCH
        case LargeBatch(tokens=tokens, limit_tokens=limit):
            assert tokens == job.tokens_per_step(winner.strategy) > limit
            assert limit == (LARGE_BATCH if job.global_batch else USUAL_BATCH)
        case DataParallelEnds():
            assert winner.strategy.micro_batch == winner.strategy.accumulate == 1
            assert f"{devices:,}" in words
        case _:
            return False
    return True


def check_limited_by(plan: Plan, winner: Candidate, reason: LimitedBy) -> None:
    """What binds, and the gains from more of it, priced again."""
    devices, words = plan.problem.cluster.devices, reason.words(plan.units.blocks)
    assert plan.limits is not None
    network = scaled_network(plan.problem.cluster, 2.0)
    gains = [(reason.twice_network, network)] if devices > 1 else []
    if reason.inner_link:
        gains.append((reason.twice_link, scaled_link(plan.problem.cluster, 2.0)))
    for gain, cluster in gains:
        faster = price_one(plan.problem, plan.units, winner.strategy, cluster)
        own = faster.tokens_per_s / winner.tokens_per_s - 1
        assert gain == pytest.approx(max(0.0, own), abs=1e-9)
    if reason.with_network is not None:
        other = price_one(plan.problem, plan.units, reason.with_network, network)
        assert other.strategy != winner.strategy
        again_gain = other.tokens_per_s / winner.tokens_per_s - 1
        assert reason.planned_again == pytest.approx(again_gain, abs=1e-6)
        assert reason.planned_again > reason.twice_network
    assert 0 <= reason.waiting_share <= 1
    if reason.binding == "latency":
        assert reason.waiting_share >= 0.03
        assert (reason.waiting_without_latency or 0.0) < reason.waiting_share
    if reason.binding == "bandwidth":
        # More bandwidth helps this configuration, so less of it hurts soon.
        assert max(reason.twice_network, reason.twice_link) >= MIN_GAIN
        assert (plan.limits.network_slack or 1.0) < 10 or plan.limits.link_binds
    binding = reason.inner_link if plan.limits.link_binds else reason.link
    assert (f"Limited by {binding} bandwidth" in words) == (reason.binding == "bandwidth")
    assert "(0% of" not in words


def check_limits(plan: Plan, winner: Candidate, reason: Reason) -> bool:
    """What limits, what is left, and tips. False for reasons of another kind."""
    words = reason.words(plan.units.blocks)
    match reason:
        case LimitedBy():
            check_limited_by(plan, winner, reason)
        case Slack(free_bytes=free, network_factor=factor):
            assert free == pytest.approx(plan.limit_bytes - winner.needed_bytes)
            if factor is not None:
                cluster = scaled_network(plan.problem.cluster, 1 / factor)
                slower = price_one(plan.problem, plan.units, winner.strategy, cluster)
                assert slower.step_s >= 1.05 * winner.step_s * (1 - 1e-9)
        case RiskyAlternative(strategy=strategy, needed_bytes=needed, gain=gain):
            risky = again(plan, strategy)
            assert risky.needed_bytes == pytest.approx(needed)
            assert needed > plan.limit_bytes
            assert gain == pytest.approx(risky.tokens_per_s / winner.tokens_per_s - 1, abs=1e-6)
        case ChunkedLoss(needed_bytes=needed, needed_plain_bytes=needed_plain):
            plain = again(plan, winner.strategy.but(loss="plain"))
            assert needed == winner.needed_bytes
            assert needed_plain == pytest.approx(plain.needed_bytes)
            # It was chosen because the plain loss does not fit, or would be less than as good.
            assert winner.strategy.loss == "chunked"
        case RootSplit(saved_bytes=saved):
            joined = again(plan, winner.strategy.but(split_root=False))
            assert saved == pytest.approx(joined.needed_bytes - winner.needed_bytes)
            assert saved > 0
        case CompileGain(gain=gain, saved_bytes=saved):
            compiled = again(plan, winner.strategy.but(compile=True))
            assert gain == pytest.approx(compiled.tokens_per_s / winner.tokens_per_s - 1, abs=1e-9)
            assert saved == pytest.approx(winner.needed_bytes - compiled.needed_bytes)
            assert share_words(gain) in words
        case Alternative(change=change, value=value, strategy=strategy):
            assert reason.needed_bytes <= plan.limit_bytes
            ratio = reason.tokens_per_s / winner.tokens_per_s - 1
            assert reason.throughput == pytest.approx(ratio)
            if change == "optimizer":
                job = plan.problem.job.but(optimizer=value)
                other = price_one(plan.problem._replace(job=job), plan.units, strategy)
                assert reason.needed_bytes == pytest.approx(other.needed_bytes)
                assert reason.tokens_per_s == pytest.approx(other.tokens_per_s)
            offloads = bool(strategy.offload)
            assert offloads == (change == "offload") == (reason.host_bytes is not None)
            assert (strategy.states is not None) == (change == "states")
            assert value in words
        case OtherParallelism():
            check_untried(plan, winner)
        case LowPrecisionReduce(dtype=dtype, gain=gain):
            low = again(plan, winner.strategy.but(reduce_dtype=dtype))
            assert gain == pytest.approx(low.tokens_per_s / winner.tokens_per_s - 1, abs=1e-9)
            assert share_words(gain) in words
        case _:
            return False
    return True


def check_fragile(plan: Plan, winner: Candidate) -> None:
    """It is told exactly where little memory is free, and of even routing where it is assumed."""
    fragile = [warning for warning in plan.warnings if isinstance(warning, Fragile)]
    assert len(fragile) == (1 - winner.needed_bytes / plan.limit_bytes < 0.1)
    experts = getattr(plan.problem.model, "experts", None)
    assert all(one.assumes_even_routing == (experts is not None) for one in fragile)


def check_too_close(plan: Plan) -> None:
    """The count of the screen, of layouts other than the winner's."""
    best, error = plan.winner, plan.comparison_error
    speeds = {c.layout: c.tokens_per_s / best.tokens_per_s for c in plan.layouts} if best else {}
    near = {one for one, ratio in speeds.items() if 1 - error <= ratio <= 1 + error}
    assert plan.too_close_to_call() == len(near - ({best.layout} if best else set()))


def check_untried(plan: Plan, winner: Candidate | None) -> None:
    """Other parallelism is named exactly where it may be better."""
    named = [kind for tip in plan.tips if isinstance(tip, OtherParallelism)
             for kind in tip.parallelism]  # fmt: skip
    job = plan.problem.job
    matters = winner is None
    if winner is not None:
        tokens = winner.tokens_per_s * winner.step_s
        unasked = job.global_batch is None and round(tokens) > USUAL_BATCH
        matters = unasked or winner.exposed_s / winner.step_s > plan.comparison_error
    several = plan.problem.cluster.devices > 1
    assert ("pipeline" in named) == (several and matters)
    assert "expert" not in named


NO_FIT = (
    Alternative,
    GradientsUnsharded,
    OtherParallelism,
    Padding,
    RiskyAlternative,
    ShorterFits,
)
CHECKS = (check_layout, check_compared, check_batch, check_limits)


def check_rule(plan: Plan, winner: Candidate) -> None:
    """The rule as it is printed, on the rows of the table."""
    job, error = plan.problem.job, plan.comparison_error

    def away(c: Candidate) -> float:
        """Where no batch is exact, those within 2 % are as good as each other."""
        share = abs(job.tokens_per_step(c.strategy) / (job.global_batch or 1) - 1)
        exact = (job.global_batch or 0) % (job.seq_len * c.strategy.data_parallel) == 0
        near = not exact and share <= 0.02
        # No batch that is near enough is worth tensor or context parallelism to come nearer.
        divided = c.layout.mesh.inner != winner.layout.mesh.inner
        return share if job.global_batch and not near and not divided else 0.0

    def headroom(c: Candidate) -> float:
        return min(0.1, math.floor(100 * (1 - c.needed_bytes / plan.limit_bytes)) / 100)

    def kind(c: Candidate) -> tuple[int, int]:
        """Simple, then small groups of whole nodes."""
        shard, s = c.layout.mesh.shard, c.strategy
        part = 1 < shard < plan.problem.cluster.devices_per_node
        simple = complexity(s, s.recompute, s.accumulate > 1) + part
        return simple, 2**40 - shard if part else shard

    # A faster one has a batch farther from what was asked for, or less headroom, or is as fast.
    rivals = [
        c for c in plan.layouts
        if away(c) <= away(winner) + 1e-9 and headroom(c) >= headroom(winner)
    ]  # fmt: skip
    fastest = max(c.tokens_per_s for c in rivals)
    assert winner.tokens_per_s >= (1 - error) * fastest * (1 - 1e-9)
    # What the winner gives up for both is no more than the error, twice.
    assert winner.tokens_per_s >= (1 - error) ** 2 * max(c.tokens_per_s for c in plan.layouts)

    every = Search(plan.problem).run().table
    rows = every.columns
    inner = np.asarray([layout.mesh.inner for layout in every.layouts])[rows.layout]

    def dominated(c: Candidate) -> bool:
        faster = rows.tokens_per_s > c.tokens_per_s * 1.005
        alike = inner == c.layout.mesh.inner
        return bool((faster & alike & (rows.needed_bytes < c.needed_bytes)).any())

    # Nothing as fast is simpler, but for what is larger and slower than another.
    equal = [c for c in rivals if c.tokens_per_s >= (1 - error) * fastest and not dominated(c)]
    assert all(kind(winner)[0] <= kind(c)[0] for c in equal)
    # Of those as simple, the fastest; of those as fast, the smallest groups.
    as_fast = [c for c in equal if 1.005 * c.tokens_per_s >= winner.tokens_per_s]
    assert all(kind(winner) <= kind(c) for c in as_fast)


def check_warning(plan: Plan, winner: Candidate, reason: Reason) -> bool:
    """What to know before the plan is trusted. False for reasons of another kind."""
    device, model = plan.problem.cluster.device, plan.problem.model
    match reason:
        case UnfittedDevice(device=name):
            assert name == device.name
            assert not plan.fitted
        case Fragile(free_bytes=free, headroom=headroom, wanted=wanted):
            assert free == plan.limit_bytes - winner.needed_bytes
            assert headroom == pytest.approx(free / plan.limit_bytes)
            assert headroom < wanted
        case OnlyReplicated(optimizer=optimizer):
            assert optimizer == plan.problem.job.optimizer
            assert not any(c.strategy.sharded for c in plan.layouts)
        case NoPeerToPeer():
            assert not device.p2p
        case FewerDevices(devices=devices, of_devices=all_devices):
            assert devices == plan.problem.cluster.devices < all_devices
        case UnfittedExperts(experts=experts, runs=runs, routing=routing):
            assert experts == getattr(model, "experts", None)
            assert runs == RUNS_WITH_EXPERTS
            assert routing == plan.problem.job.routing
        case _:
            return False
    return True


@examples(25)
@given(st.integers(0, 2**32), st.sampled_from(["throughput", "memory"]))
def test_every_reason_agrees_with_the_table(seed: int, objective: str) -> None:
    problem = random_problem(random.Random(seed))
    try:
        plan = make_plan(problem, objective="memory" if objective == "memory" else "throughput")
    except SpecError:
        return
    check_untried(plan, plan.winner)
    check_too_close(plan)
    if plan.winner is None:
        for tip in plan.tips:
            assert isinstance(tip, NO_FIT)
            if isinstance(tip, Alternative):
                assert tip.needed_bytes <= plan.limit_bytes
        assert all(miss.needed_bytes > plan.limit_bytes for miss in plan.rejected)
        return
    winner = plan.winner
    assert winner.needed_bytes <= plan.limit_bytes
    assert again(plan, winner.strategy).tokens_per_s == pytest.approx(winner.tokens_per_s)
    for reason in (*plan.why, *plan.limits_why, *plan.tips):
        assert sum(one(plan, winner, reason) for one in CHECKS) == 1, reason.kind
        # Nothing that a screen must not print.
        assert not re.search(r"-0\.0|nan|inf\b|None", reason.words(plan.units.blocks))
        assert reason.to_dict()["kind"] == reason.kind
    for warning in plan.warnings:
        assert check_warning(plan, winner, warning), warning.kind
        assert not re.search(r"-0\.0|nan|inf\b|None", warning.words(plan.units.blocks))
    check_fragile(plan, winner)
    assert sum(isinstance(reason, StepBatch) for reason in plan.why) == 1
    if isinstance(plan.aim, LeastMemory):
        least = plan.aim.share * plan.aim.fastest_tokens_per_s
        assert winner.tokens_per_s >= least * (1 - 1e-9)
        assert all(c.tokens_per_s < least for c in plan.front)
        assert all(
            c.needed_bytes >= winner.needed_bytes - 1
            for c in plan.layouts
            if c.tokens_per_s >= least
        )
    else:
        check_rule(plan, winner)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 5))]
)
def test_a_plan_is_near_the_best_of_brute_force(number: int) -> None:
    """A slice of `benchmarks/brute_force.py`, which compares 500."""
    outcome = compare(random_problems(5, seed=1)[number])
    assert not outcome.failed
    assert outcome.ratio is not None
    assert outcome.ratio >= 1 - ALLOWED
