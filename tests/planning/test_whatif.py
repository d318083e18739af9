"""What-if questions: points, what changed between them, thresholds."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from shardwise.planning.plan import make_plan
from shardwise.planning.problem import Problem
from shardwise.planning.whatif import changes, least, parse_target, point, sized, study, varied
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy


def problem(model: str, cluster: str, seq_len: int = 2048, batch: int | None = None) -> Problem:
    job = Job(seq_len=seq_len, global_batch=batch)
    return Problem(find_model(model), find_cluster(cluster), job, Strategy(kind="zero3"))


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-13b"])
def test_doubling_the_network_changes_mfu_by_the_points_it_prints(model: str) -> None:
    """At 512 devices with 40 GB; the sentence names the mechanism and each part of it is true."""
    asked = problem(model, "64x8xA100-40GB@100Gbps")
    before, after = study(asked, "network", ["100", "200"])
    assert before.mfu is not None
    assert after.mfu is not None
    assert before.candidate is not None
    assert after.candidate is not None
    said = changes(before, after)
    (points,) = re.findall(r"MFU ([+-][0-9.]+) points", said)
    assert float(points) == pytest.approx(100 * (after.mfu - before.mfu), abs=0.051)
    assert after.mfu > before.mfu
    one, other = before.candidate.strategy, after.candidate.strategy
    assert ("recomputation" in said) == (one.recompute != other.recompute)
    assert ("micro-batch" in said) == (one.micro_batch != other.micro_batch)
    # The planner gives the same answer as the what-if.
    planned = make_plan(asked).winner
    assert planned is not None
    assert planned.tokens_per_s == pytest.approx(before.candidate.tokens_per_s, rel=0.03)


def test_a_faster_network_can_mean_less_recomputation() -> None:
    """The mechanism: a slow network asks for a larger micro-batch to hide behind, which takes the
    memory of activations, which have to be recomputed.
    """
    slow, fast = study(problem("llama-2-7b", "64x8xA100-40GB@50Gbps"), "network", ["50", "100"])
    said = changes(slow, fast)
    assert "less recomputation (selective to none)" in said
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
        changed, told = varied(asked, name, text)
        assert told == shown
        assert changed != asked
        assert point(changed, told).candidate is not None


def test_clusters_grow_and_shrink_in_whole_nodes() -> None:
    cluster = find_cluster("4x8xA100-80GB@200Gbps")
    assert str(sized(cluster, 64)) == "8x8xA100-80GB@200Gbps"
    assert sized(cluster, 4).devices_per_node == 4
    # One machine has room for as many devices as its kind has.
    assert str(sized(find_cluster("1xA100-80GB"), 4)) == "1x4xA100-80GB"
    with pytest.raises(SpecError, match="12 do not fill nodes of 8"):
        sized(cluster, 12)
    with pytest.raises(SpecError, match="need several nodes and a network"):
        sized(find_cluster("8xA100-80GB"), 16)


def test_the_least_network_is_enough_and_a_little_less_is_not() -> None:
    asked = problem("llama-3-8b", "8x8xH100-SXM@100Gbps", 4096, 64 * 4096 * 4)
    target = parse_target("mfu=36%")
    found = least(asked, "network", target)
    assert found.point is not None
    rate = found.point.problem.cluster.network
    assert rate is not None
    assert target.met(found.point)
    below, _ = varied(asked, "network", f"{rate * 8e-9 / 1.05:.4f}Gbps")
    assert not target.met(point(below, ""))


def test_the_batch_that_hides_communication() -> None:
    """Tokens per device at which at most 2 % of a step waits for the network."""
    asked = problem("llama-3-8b", "8x8xH100-SXM@50Gbps", 4096)
    target = parse_target("exposed=2%")
    found = least(asked, "global-batch", target)
    assert found.point is not None
    assert found.point.candidate is not None
    assert found.point.candidate.exposed_s <= 0.02 * found.point.candidate.step_s
    # One sequence per device is not enough.
    assert not target.met(found.tried[0])


def test_the_least_number_of_devices_for_a_step_time() -> None:
    asked = problem("llama-3-8b", "1x8xH100-SXM@400Gbps", 4096, 2**22)
    found = least(asked, "devices", parse_target("step=10s"))
    assert found.point is not None
    devices = found.point.problem.cluster.devices
    fewer, _ = varied(asked, "devices", str(devices - 8))
    less = point(fewer, "").candidate
    assert less is not None
    assert less.step_s > 10


def test_what_cannot_be_asked_is_one_sentence() -> None:
    asked = problem("llama-3-8b", "8xH100-SXM")
    with pytest.raises(SpecError, match="unknown quantity 'netwrok'; did you mean 'network'"):
        varied(asked, "netwrok", "100")
    with pytest.raises(SpecError, match="one node has none"):
        varied(asked, "network", "100")
    assert parse_target("step=5ms").value == pytest.approx(0.005)
    assert parse_target("mfu=45") == parse_target("mfu=45%") == parse_target("mfu=0.45")
    for text in ("mfu=200%", "speed=3", "mfu", "step=-1s", "step=inf", "mfu=nan"):
        with pytest.raises(SpecError, match="write mfu=45%, step=10s or exposed=1%"):
            parse_target(text)


def test_a_value_that_cannot_be_is_told_in_its_row() -> None:
    asked = problem("gpt2", "1xRTX-4090", 1024)
    first, second = study(asked, "seq-len", ["1024", "2048"])
    assert first.candidate is not None
    assert second.candidate is None
    assert "exceeds the 1024 learned positions" in second.refused
    with pytest.raises(SpecError, match="exceeds the 1024 learned positions"):
        study(asked, "seq-len", ["2048", "4096"])


def test_reasons_go_the_way_the_whole_went() -> None:
    """Nothing that helps is named where it got worse, and the other way round."""
    asked = problem("llama-3-8b", "8x8xH100-SXM@400Gbps", 4096, 2**22)
    for name, values in (("devices", ["8", "64", "512"]), ("network", ["400", "100", "25"])):
        for before, after in pairwise(study(asked, name, values)):
            said = changes(before, after)
            if (after.mfu or 0) < (before.mfu or 0):
                assert "less recomputation" not in said
                assert "less slowed" not in said
            else:
                assert "more recomputation" not in said
                assert "more slowed" not in said
