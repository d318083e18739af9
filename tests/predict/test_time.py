"""Step times of whole runs: what must hold whatever the coefficients are."""

from __future__ import annotations

from typing import Any

import pytest

import shardwise
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_cluster
from shardwise.step.profile import StepProfile


def estimate(cluster: str = "8x8xH100-SXM@400Gbps", **settings: Any) -> StepProfile:
    return shardwise.estimate("llama-3-8b", cluster, **{"seq_len": 4096, **settings})


def seconds(profile: StepProfile) -> float:
    assert profile.time is not None
    return profile.time.step_s


def test_the_parts_sum_to_the_step() -> None:
    for kind in ("ddp", "zero2", "zero3", "hsdp"):
        time = estimate(strategy=kind, recompute="full", accumulate=3).time
        assert time is not None
        parts = (time.compute_s, time.exposed_communication_s, time.exposed_copy_s)
        assert sum(p or 0.0 for p in parts) + (time.optimizer_s or 0.0) == pytest.approx(
            time.step_s
        )
        assert time.step_s_interval is not None
        assert time.step_s_interval[0] < time.step_s < time.step_s_interval[1]


def test_more_bandwidth_never_slows() -> None:
    steps = [seconds(estimate(f"8x8xH100-SXM@{rate}Gbps")) for rate in (10, 25, 50, 100, 200, 400)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 2 * steps[-1]


def test_a_slow_network_is_the_bottleneck_and_hybrid_sharding_the_way_out() -> None:
    slow = "8x8xH100-SXM@10Gbps"
    everywhere, inside = estimate(slow, strategy="zero3"), estimate(slow, strategy="hsdp")
    assert everywhere.bottleneck == "bandwidth"
    assert seconds(inside) < seconds(everywhere)
    assert estimate(strategy="zero3", recompute="full", micro_batch=2).bottleneck == "compute"


def test_recomputation_costs_time() -> None:
    none, selective, full = (
        seconds(estimate(recompute=policy)) for policy in ("none", "selective", "full")
    )
    assert none < selective < full < 4 / 3 * 1.05 * none


def test_twice_the_work_takes_twice_as_long_or_less() -> None:
    one, two = seconds(estimate(micro_batch=2)), seconds(estimate(micro_batch=4))
    assert one < two <= 2 * one
    accumulated = seconds(estimate(micro_batch=2, accumulate=2))
    assert two <= accumulated <= 2 * one


def test_mfu_says_what_it_means() -> None:
    profile = estimate(recompute="full")
    assert profile.throughput is not None
    assert profile.work is not None
    rates = profile.throughput
    # Tokens per second and device times FLOPs per token over the dense bf16 peak, 989.5 TFLOPS.
    per_token = profile.work.model_flops / profile.work.tokens
    assert rates.mfu == pytest.approx(
        rates.tokens_per_s_per_device * per_token / 989.5e12, rel=1e-3
    )
    assert rates.hfu is not None
    assert rates.mfu is not None
    assert rates.mfu < rates.hfu < 4 / 3 * rates.mfu * 1.001
    assert rates.mfu_convention


def test_what_cannot_be_known_has_no_time() -> None:
    for cluster in ("1x2xCPU", "2x8xH100-SXM"):  # the last names no network
        profile = estimate(cluster)
        assert profile.time is None
        assert profile.throughput is None
        assert "time" not in profile.to_dict()


def test_a_device_without_measured_runs_has_a_wide_interval() -> None:
    """MI300X was predicted 34 to 50 % too fast on published runs: the interval covers that."""

    def ends(cluster: str) -> tuple[float, float]:
        time = estimate(cluster).time
        assert time is not None
        assert time.step_s_interval is not None
        low, high = time.step_s_interval
        return low / time.step_s, high / time.step_s

    assert ends("8xMI300X")[1] >= 1.5
    assert ends("8xH100-SXM")[1] < ends("8xMI300X")[1]


def test_offloading_costs_time() -> None:
    kept, moved = estimate(recompute="full"), estimate(recompute="full", offload=True)
    assert seconds(moved) > 1.05 * seconds(kept)


def test_groups_smaller_than_a_node_reduce_over_the_network_too() -> None:
    """Two groups of 4 in a node share its ports: gradients still have to leave the node."""
    fast, slow = (
        seconds(estimate(f"8x8xH100-SXM@{rate}Gbps", strategy="zero3:4")) for rate in (400, 10)
    )
    assert slow > 1.5 * fast


def test_many_small_messages_are_bound_by_latency() -> None:
    """A small model cut over thousands of devices waits for hops, not for bytes."""
    tiny = shardwise.estimate("gpt2", "512x8xH100-SXM@400Gbps", "zero3", seq_len=128)
    assert tiny.bottleneck == "latency"
    slow = estimate("8x8xH100-SXM@10Gbps", strategy="zero3")
    assert slow.bottleneck == "bandwidth"


def test_groups_within_a_pod_do_not_see_what_lies_between_pods() -> None:
    plain = find_cluster("16x8xH100-SXM@100Gbps")
    pods = plain.but(pod_nodes=4, oversubscription=4.0)

    def step(cluster: ClusterSpec, strategy: str) -> float:
        return seconds(shardwise.estimate("llama-3-8b", cluster, strategy, seq_len=4096))

    assert step(pods, "zero3") > 1.2 * step(plain, "zero3")
    quarter = find_cluster("16x8xH100-SXM@25Gbps")
    assert step(pods, "zero3") == pytest.approx(step(quarter, "zero3"), rel=1e-9)
    # Groups of 32 are one pod: their gathers stay inside, only their all-reduce leaves it.
    assert step(plain, "zero3:32") < step(pods, "zero3:32") < step(pods, "zero3")
