"""What-if questions: points, what changed between them, thresholds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.planning.difference import difference
from shardwise.planning.make import make_plan
from shardwise.planning.money import DAY, Budget
from shardwise.planning.problem import Problem
from shardwise.planning.threshold import devices_for_deadline, find_threshold, parse_target
from shardwise.planning.vary import with_devices, with_quantity
from shardwise.planning.whatif import predict_point, study
from shardwise.predict.intervals import is_fitted
from shardwise.predict.kernels import coefficients_for
from shardwise.spec.calibration import Calibration
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy


def problem(model: str, cluster: str, seq_len: int = 2048, batch: int | None = None) -> Problem:
    job = Job(seq_len=seq_len, global_batch=batch)
    return Problem(find_model(model), find_cluster(cluster), job, Strategy(kind="zero3"))


def test_doubling_the_network_raises_mfu_by_the_difference() -> None:
    """At 512 devices with 40 GB; each cause that is named is true."""
    asked = problem("llama-2-7b", "64x8xA100-40GB@100Gbps")
    before, after = study(asked, "network", ["100", "200"])
    change = difference(before, after)
    assert change is not None
    assert before.candidate is not None
    assert after.candidate is not None
    assert change.mfu == (after.mfu or 0) - (before.mfu or 0) > 0
    one, other = before.candidate.strategy, after.candidate.strategy
    assert (change.recompute is not None) == (one.recompute != other.recompute)
    assert change.micro_batch_changed == (one.micro_batch != other.micro_batch)
    # The planner gives the same answer as the what-if.
    planned = make_plan(asked).winner
    assert planned is not None
    assert planned.tokens_per_s == pytest.approx(before.candidate.tokens_per_s, rel=0.03)


def test_a_faster_network_can_mean_less_recomputation() -> None:
    """The mechanism: a slow network asks for a larger micro-batch to hide behind, which takes the
    memory of activations, which have to be recomputed.
    """
    slow, fast = study(problem("llama-2-7b", "64x8xA100-40GB@50Gbps"), "network", ["50", "100"])
    change = difference(slow, fast)
    assert change is not None
    assert change.recompute == "less"
    assert slow.candidate is not None
    assert fast.candidate is not None
    assert slow.candidate.strategy.micro_batch > fast.candidate.strategy.micro_batch


def test_more_never_hurts() -> None:
    """Network and memory: the best with more of them is not slower, simplicity's tie aside."""
    asked = problem("llama-2-13b", "8x8xA100-40GB@100Gbps")
    for name, values in (("network", ["10", "50", "200"]), ("memory", ["40", "80", "160"])):
        speeds = [p.candidate.tokens_per_s for p in study(asked, name, values) if p.candidate]
        assert len(speeds) == len(values)
        assert all(b >= 0.97 * a for a, b in pairwise(speeds))


def test_every_quantity_can_be_varied() -> None:
    asked = problem("llama-3-8b", "4x8xA100-80GB@200Gbps")
    for name, text, shown in (
        ("network", "400", "400Gbps"),
        ("network", "50GB/s", "400Gbps"),
        ("memory", "40", "40.00 GiB"),
        ("device", "h100-sxm", "H100-SXM"),
        ("devices", "64", "64"),
        ("seq-len", "4k", "4,000"),
        ("global-batch", "4M", "4.00M"),
    ):
        changed, told = with_quantity(asked, name, text)
        assert told == shown
        assert changed != asked
        assert predict_point(changed, told).candidate is not None


def test_clusters_grow_and_shrink_in_whole_nodes() -> None:
    cluster = find_cluster("4x8xA100-80GB@200Gbps")
    assert str(with_devices(cluster, 64)) == "8x8xA100-80GB@200Gbps"
    assert with_devices(cluster, 4).devices_per_node == 4
    # One machine has room for as many devices as its kind has.
    assert str(with_devices(find_cluster("1xA100-80GB"), 4)) == "1x4xA100-80GB"
    with pytest.raises(SpecError, match="give 8 or 16"):
        with_devices(cluster, 12)
    with pytest.raises(SpecError, match="--cluster 1x8xA100-80GB@400Gbps"):
        with_devices(find_cluster("8xA100-80GB"), 16)


@pytest.mark.nightly
def test_the_least_network_is_enough_and_a_little_less_is_not() -> None:
    asked = problem("llama-3-8b", "8x8xH100-SXM@100Gbps", 4096, 64 * 4096 * 4)
    target = parse_target("mfu=36%")
    found = find_threshold(asked, "network", target)
    assert found.answer is not None
    rate = found.answer.problem.cluster.network
    assert rate is not None
    assert target.met(found.answer)
    below, _ = with_quantity(asked, "network", f"{rate * 8e-9 / 1.05:.4f}Gbps")
    assert not target.met(predict_point(below, ""))


@pytest.mark.nightly
def test_the_batch_that_hides_communication() -> None:
    """Tokens per device at which at most 2 % of a step waits for the network."""
    asked = problem("llama-3-8b", "8x8xH100-SXM@50Gbps", 4096)
    target = parse_target("exposed=2%")
    found = find_threshold(asked, "global-batch", target)
    assert found.answer is not None
    assert found.answer.candidate is not None
    assert found.answer.candidate.exposed_s <= 0.02 * found.answer.candidate.step_s
    # One sequence per device is not enough.
    assert not target.met(found.tried[0])


def test_the_least_number_of_devices_for_a_step_time() -> None:
    asked = problem("llama-3-8b", "1x8xH100-SXM@400Gbps", 4096, 2**22)
    found = find_threshold(asked, "devices", parse_target("step=10s"))
    assert found.answer is not None
    devices = found.answer.problem.cluster.devices
    fewer, _ = with_quantity(asked, "devices", str(devices - 8))
    less = predict_point(fewer, "").candidate
    assert less is not None
    assert less.step_s > 10


def test_a_single_node_has_no_network_to_vary_but_a_plan() -> None:
    asked = problem("llama-3-8b", "8xH100-SXM", 4096)
    planned = make_plan(asked)
    assert planned.winner is not None
    reached = planned.mfu(planned.winner)
    for share, met in ((reached - 0.01, True), (reached + 0.01, False)):
        found = find_threshold(asked, "network", parse_target(f"mfu={share:.4f}"))
        assert found.obstacle == "no network"
        assert found.answer is None
        assert found.met is met
        assert found.best is not None
        assert found.best.mfu == pytest.approx(reached)
        assert found.best.binding == (planned.limits.binding if planned.limits else None)


def test_more_devices_than_a_node_has_need_a_network() -> None:
    found = find_threshold(problem("gpt2", "4xH100-SXM", 1024), "devices", parse_target("step=1ms"))
    assert found.obstacle == "network needed"
    assert not found.met
    # A node of this kind has room for eight.
    assert [p.problem.cluster.devices for p in found.tried] == [1, 2, 4, 8]


def test_a_missed_deadline_is_met_by_the_devices_it_names_and_by_no_fewer() -> None:
    asked = problem("llama-3.2-1b", "1x8xH100-SXM@400Gbps")
    here = predict_point(asked, "").candidate
    assert here is not None
    tokens = 1e12
    deadline = tokens / here.tokens_per_s / 5
    found = devices_for_deadline(asked, Budget(tokens=tokens, deadline_s=deadline))
    assert found is not None
    assert found.answer is not None
    assert found.answer.candidate is not None
    assert tokens / found.answer.candidate.tokens_per_s <= deadline
    devices = found.answer.problem.cluster.devices
    assert devices >= 5 * 8
    fewer = predict_point(with_quantity(asked, "devices", str(devices - 8))[0], "").candidate
    assert fewer is not None
    assert tokens / fewer.tokens_per_s > deadline
    assert devices_for_deadline(asked, Budget(tokens=tokens)) is None


def test_a_deadline_that_no_cluster_meets() -> None:
    """The batch has 8 sequences: no more than 8 devices can work on it."""
    asked = problem("gpt2", "1x8xH100-SXM@400Gbps", 1024, 8 * 1024)
    found = devices_for_deadline(asked, Budget(tokens=1e15, deadline_s=DAY))
    assert found is not None
    assert found.answer is None
    assert found.obstacle is None


def test_another_device_keeps_its_interval_and_says_whether_it_was_fitted() -> None:
    asked = problem("llama-3-8b", "8xH100-SXM", 4096)
    fitted, other = study(asked, "device", ["A100-80GB", "MI300X"])
    assert (fitted.fitted, other.fitted) == (True, False)
    for one in (fitted, other):
        plan = make_plan(one.problem)
        low, high = plan.interval
        assert one.fitted is plan.fitted
        assert one.candidate is not None
        step = one.candidate.step_s
        assert one.step_s_interval == pytest.approx((step * (1 + low), step * (1 + high)))


def test_another_device_does_not_inherit_a_calibration() -> None:
    plain = find_cluster("8xH100-SXM")
    rates = coefficients_for(plain)
    assert rates is not None
    fields = Calibration.model_fields
    measured = {name: rate for name, rate in rates._asdict().items() if name in fields}
    cluster = plain.but(calibration=Calibration(**measured))
    asked = problem("gpt2", "8xH100-SXM")._replace(cluster=cluster)
    assert is_fitted(asked.cluster)
    changed, _ = with_quantity(asked, "device", "MI300X")
    assert not is_fitted(changed.cluster)
    same, _ = with_quantity(asked, "device", "H100-SXM")
    assert same.cluster.calibration is not None


def test_what_cannot_be_asked_is_one_sentence() -> None:
    asked = problem("llama-3-8b", "8xH100-SXM")
    with pytest.raises(SpecError, match="unknown quantity 'netwrok'; did you mean 'network'"):
        with_quantity(asked, "netwrok", "100")
    with pytest.raises(SpecError, match="--cluster 2x8xH100-SXM@400Gbps"):
        with_quantity(asked, "network", "100")
    with pytest.raises(SpecError, match="--tokens 1T"):
        parse_target("days=3")
    assert parse_target("days=3", 1e9) == ("days", 3 * DAY, 1e9)
    assert parse_target("step=5ms").value == pytest.approx(0.005)
    assert parse_target("mfu=45") == parse_target("mfu=45%") == parse_target("mfu=0.45")
    for text in ("mfu=200%", "speed=3", "mfu", "step=-1s", "step=inf", "mfu=nan", "days=-1"):
        with pytest.raises(SpecError, match="write mfu=45%"):
            parse_target(text, 1e9)


def test_a_value_that_cannot_be_is_told_in_its_row() -> None:
    asked = problem("gpt2", "1xRTX-4090", 1024)
    first, second = study(asked, "seq-len", ["1024", "2048"])
    assert first.candidate is not None
    assert second.candidate is None
    assert "exceeds the 1024 learned positions" in second.refused
    with pytest.raises(SpecError, match="exceeds the 1024 learned positions"):
        study(asked, "seq-len", ["2048", "4096"])


def test_causes_go_the_way_the_total_went() -> None:
    """Nothing that helps is named where MFU fell, and the other way round."""
    asked = problem("llama-3-8b", "8x8xH100-SXM@400Gbps", 4096, 2**22)
    for name, values in (("devices", ["8", "64", "512"]), ("network", ["400", "100", "25"])):
        for before, after in pairwise(study(asked, name, values)):
            change = difference(before, after)
            assert change is not None
            wrong = "less" if change.mfu < 0 else "more"
            assert change.recompute != wrong
            assert change.contention != wrong
            if change.exposed is not None:
                assert (change.exposed[1] < change.exposed[0]) == (change.mfu > 0)
