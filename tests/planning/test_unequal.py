"""Plans for clusters of unequal parts, against arithmetic and against equal clusters."""

from __future__ import annotations

import itertools

import pytest

import shardwise
from shardwise.planning.unequal import UnequalPlan, plan_unequal
from shardwise.predict.api import estimate_run
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec

MIXED = "1x8xH100-SXM + 1x8xA100-80GB@200Gbps"


def planned(model: str, cluster: str, batch: str | None) -> UnequalPlan:
    return plan_unequal(describe_run(model, cluster, planned=True, global_batch=batch))


@pytest.fixture(scope="module")
def plan() -> UnequalPlan:
    return planned("llama-3-8b", MIXED, "4Mi")


def test_the_step_is_that_of_the_slowest_part(plan: UnequalPlan) -> None:
    """Predicted again for clusters of either device, each with the part's own accumulation."""
    run, profile = plan.chosen, plan.profile
    assert run is not None
    assert profile is not None
    assert profile.parts is not None
    assert run.strategy.shares is not None
    seconds = []
    for share, device in zip(run.strategy.shares, ("H100-SXM", "A100-80GB"), strict=True):
        alike = estimate_run(
            describe_run(
                "llama-3-8b",
                f"2x8x{device}@200Gbps",
                run.strategy.but(accumulate=share.accumulate),
            )
        )
        assert alike.time is not None
        seconds.append(alike.time.step_s)
    assert [part.step_s for part in profile.parts] == seconds
    assert profile.time is not None
    assert plan.winner is not None
    assert plan.winner.step_s == pytest.approx(max(seconds), rel=1e-12)
    assert profile.time.step_s == max(seconds)
    assert profile.work is not None
    tokens = sum(8 * share.accumulate for share in run.strategy.shares)
    tokens *= run.job.seq_len * run.strategy.micro_batch
    assert profile.work.tokens == plan.winner.tokens == run.job.global_batch == tokens
    assert abs(tokens / 2**22 - 1) <= 0.05


def test_no_other_shares_are_faster(plan: UnequalPlan) -> None:
    run = plan.chosen
    assert run is not None
    assert run.strategy.shares is not None
    assert plan.winner is not None
    counts = [share.accumulate for share in run.strategy.shares]
    for change in itertools.product((-2, -1, 1, 2), repeat=2):
        others = [count + step for count, step in zip(counts, change, strict=True)]
        assert _tokens_per_s(run, others) <= plan.winner.tokens_per_s * 1.01


def _tokens_per_s(run: RunSpec, counts: list[int]) -> float:
    shared = describe_run(
        "llama-3-8b", MIXED, run.strategy.but(accumulate=1), shares=",".join(map(str, counts))
    )
    rates = estimate_run(shared).throughput
    assert rates is not None
    return rates.tokens_per_s


def test_shares_beat_equal_ones_and_each_part_alone(plan: UnequalPlan) -> None:
    assert plan.winner is not None
    assert plan.equal is not None
    alone = [one.best.tokens_per_s for one in plan.alone if one.best is not None]
    assert len(alone) == 2
    # With equal shares all are as slow as the A100: slower than the H100 alone.
    assert plan.equal.tokens_per_s < max(alone) < plan.winner.tokens_per_s < sum(alone) * 1.01


def test_where_it_cannot_pay_there_is_no_winner() -> None:
    """Through 1 Gbps the reduction takes longer than the A100 save."""
    plan = planned("llama-3.2-1b", "1x8xH100-SXM + 1x8xA100-80GB@1Gbps", "1Mi")
    assert plan.best is not None
    assert plan.gain is not None
    assert plan.gain < 0
    assert plan.winner is None
    assert plan.chosen is None
    assert plan.fastest_alone is not None
    assert plan.fastest_alone.part.device.name == "H100-SXM"


def test_every_part_needs_room_for_the_model() -> None:
    """8B with all states on either card does not fit, whatever its share."""
    plan = planned("llama-3-8b", "1x1xH100-SXM + 1x1xRTX-4090@100Gbps", "64Ki")
    assert plan.winner is None
    assert plan.best is None


def test_python_plans_parts_by_a_function_that_its_refusal_names(plan: UnequalPlan) -> None:
    found = shardwise.plan_parts("llama-3-8b", MIXED, global_batch="4Mi")
    assert found.winner == plan.winner
    with pytest.raises(SpecError, match="shardwise.plan_parts"):
        shardwise.plan("llama-3-8b", MIXED)
    with pytest.raises(SpecError, match="shardwise.plan"):
        shardwise.plan_parts("llama-3-8b", "8xH100-SXM")
