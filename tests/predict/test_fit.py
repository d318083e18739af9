"""Does it fit, why not, and what would help: decisions at the boundaries practitioners know."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.api import describe_run, estimate_run, ways_for
from shardwise.predict.estimate import reserved_interval, verdict
from shardwise.predict.fit import shortfall_of
from shardwise.spec import catalogue

GIB = 2**30


def test_gpt2_large_in_fp32_fits_one_h100() -> None:
    profile = shardwise.estimate("gpt2-large", "1xH100-SXM", precision="fp32")
    assert profile.memory.fits is True
    low, high = profile.memory.peak_reserved_bytes or (0, 0)
    assert profile.memory.peak_allocated_bytes <= low < high


@pytest.mark.parametrize("nodes", [1, 8, 64, 1024, 12500])
def test_llama_70b_zero2_fits_80_gb_on_no_number_of_gpus(nodes: int) -> None:
    run = describe_run(
        "llama-3-70b", f"{nodes}x8xH100-SXM@400Gbps", "zero2", seq_len=1, recompute="full"
    )
    profile = estimate_run(run)
    assert profile.memory.fits is False
    # 141 GB gathered in bf16, less the one block that is being reduced at the peak.
    assert profile.memory.terms["unsharded_parameters"] >= 139e9
    short = shortfall_of(profile, run.strategy)
    assert short.largest_term == "unsharded_parameters"
    assert short.largest_bytes >= 139e9
    assert short.unshrinking_bytes is not None
    assert short.unshrinking_bytes > 139e9
    assert short.keeps_all_gathered


def test_what_would_help_helps() -> None:
    run = describe_run("llama-3-70b", "8x8xH100-SXM", "zero2", seq_len=4096, micro_batch=1)
    ways = ways_for(run)
    assert ways[0].options == "--strategy zero3 --recompute full"
    changed = shardwise.estimate(
        "llama-3-70b", "8x8xH100-SXM", "zero3", seq_len=4096, recompute="full"
    )
    assert changed.memory.verdict == "fits"
    assert changed.memory.needed_bytes == pytest.approx(ways[0].needed_bytes, abs=16)


def test_more_devices_are_offered_where_they_help() -> None:
    run = describe_run("llama-3-70b", "1x8xH100-SXM", "zero3", seq_len=2048, recompute="full")
    assert estimate_run(run).memory.fits is False
    assert any(" devices with " in way.options for way in ways_for(run))


def test_smaller_groups_are_offered_where_padding_is_what_breaks_it() -> None:
    run = describe_run("qwen3-235b-a22b", "64x8xH100-SXM", "zero3", recompute="full")
    assert estimate_run(run).memory.fits is False
    ways = ways_for(run)
    assert ways[0].options == "--strategy zero3:128"
    smaller = shardwise.estimate("qwen3-235b-a22b", "64x8xH100-SXM", "zero3:128", recompute="full")
    assert smaller.memory.verdict == "fits"


def test_offload_is_the_last_resort_and_names_its_price() -> None:
    ways = ways_for(describe_run("llama-3-8b", "1xH100-SXM"))
    assert ways[0].options == "--strategy zero3 --offload"
    # 16 bytes a parameter move to the host.
    assert ways[0].host_bytes == 16 * 8_030_261_248
    with_room = ways_for(describe_run("llama-3-70b", "8x8xH100-SXM", "zero2"))
    assert all(way.host_bytes == 0 for way in with_room)


def test_the_largest_micro_batch_that_fits_comes_first() -> None:
    run = describe_run("llama-3-8b", "8xH100-SXM", recompute="full", micro_batch=16)
    assert ways_for(run)[0].options == "--micro-batch 4"


def test_a_hundred_and_sixty_thousand_devices() -> None:
    run = describe_run("llama-3-8b", "20000x8xH100-SXM@400Gbps")
    assert estimate_run(run).cluster["devices"] == 160_000
    assert ways_for(run)


def test_ddp_holds_less_than_five_billion_parameters_in_80_gb() -> None:
    # 16 bytes a parameter: 80 GB end before 5 B (published decision rules say 7 B).
    assert shardwise.estimate(
        "llama-3.2-3b", "8xH100-SXM", "ddp", seq_len=512, recompute="full"
    ).memory.fits
    assert not shardwise.estimate(
        "qwen2.5-7b", "8xH100-SXM", "ddp", seq_len=1, recompute="full"
    ).memory.fits


def test_the_verdict_has_three_answers() -> None:
    device = catalogue.devices()["H100-SXM"]
    assert verdict(40 * GIB, device) == "fits"
    assert verdict(75 * GIB, device) == "at risk"
    assert verdict(76 * GIB, device) == "does not fit"  # 96 % of 79.1 GiB
    cpu = catalogue.devices()["CPU"]
    assert reserved_interval(10 * GIB, cpu) == (10 * GIB, 10 * GIB)


def test_a_two_trillion_parameter_model_on_a_hundred_thousand_gpus() -> None:
    model = catalogue.model("llama-3.1-405b").but(
        hidden=32768, ffn=106496, heads=256, kv_heads=16, layers=160
    )
    run = describe_run(model, "12500x8xB200@400Gbps", "hsdp", seq_len=8192, recompute="full")
    profile = estimate_run(run)
    assert profile.model["parameters"] > 2e12
    assert profile.cluster["devices"] == 100_000
    assert sum(profile.memory.terms.values()) == profile.memory.peak_allocated_bytes
