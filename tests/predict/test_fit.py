"""Does it fit, why not, and what would help: decisions at the boundaries practitioners know."""

from __future__ import annotations

import json
import random
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

import shardwise
from shardwise.cli.main import add_commands, app
from shardwise.planning.api import changes_to_fit_run, plan_run
from shardwise.predict.api import estimate_run
from shardwise.predict.estimate import reserved_interval, verdict
from shardwise.predict.fit import shortfall_of
from shardwise.spec import catalogue
from shardwise.spec.question import describe_run

GIB = 2**30


def test_gpt2_large_in_fp32_fits_one_h100() -> None:
    profile = shardwise.estimate("gpt2-large", "1xH100-SXM", precision="fp32")
    assert profile.known_memory.fits is True
    low, high = profile.known_memory.peak_reserved_bytes or (0, 0)
    assert profile.known_memory.peak_allocated_bytes <= low < high


@pytest.mark.parametrize("nodes", [1, 8, 64, 1024, 12500])
def test_llama_70b_zero2_fits_80_gb_on_no_number_of_gpus(nodes: int) -> None:
    run = describe_run(
        "llama-3-70b", f"{nodes}x8xH100-SXM@400Gbps", "zero2", seq_len=1, recompute="full"
    )
    profile = estimate_run(run)
    assert profile.known_memory.fits is False
    # 141 GB gathered in bf16, less the one block that is being reduced at the peak.
    assert profile.known_memory.terms["unsharded_parameters"] >= 139e9
    short = shortfall_of(profile, run.strategy)
    assert short.largest_term == "unsharded_parameters"
    assert short.largest_bytes >= 139e9
    assert short.unshrinking_bytes is not None
    assert short.unshrinking_bytes > 139e9
    assert short.keeps_all_gathered


def test_what_would_help_helps() -> None:
    run = describe_run("llama-3-70b", "8x8xH100-SXM", "zero2", seq_len=4096, micro_batch=1)
    ways = changes_to_fit_run(run)
    assert ways[0].options == "--strategy zero3 --recompute full"
    changed = shardwise.estimate(
        "llama-3-70b", "8x8xH100-SXM", "zero3", seq_len=4096, recompute="full"
    )
    assert changed.known_memory.verdict == "fits"
    assert changed.known_memory.needed_bytes == pytest.approx(ways[0].needed_bytes, abs=16)


def test_more_devices_are_offered_where_they_help() -> None:
    run = describe_run("llama-3-70b", "1x8xH100-SXM", "zero3", seq_len=2048, recompute="full")
    assert estimate_run(run).known_memory.fits is False
    assert any("--cluster " in way.options for way in changes_to_fit_run(run))


def test_smaller_groups_are_offered_where_padding_is_what_breaks_it() -> None:
    """48 devices divide neither 8 experts nor their rows; 16 divide the rows."""
    run = describe_run("mixtral-8x7b", "6x8xH100-SXM", "zero3", recompute="full")
    assert estimate_run(run).known_memory.fits is False
    ways = changes_to_fit_run(run)
    assert ways[0].options == "--strategy zero3:16"
    smaller = shardwise.estimate("mixtral-8x7b", "6x8xH100-SXM", "zero3:16", recompute="full")
    assert smaller.known_memory.verdict == "fits"


def test_offload_is_the_last_resort_and_names_its_price() -> None:
    ways = changes_to_fit_run(describe_run("llama-3-8b", "1xH100-SXM"))
    assert ways[0].options == "--offload-optimizer"
    # 16 bytes a parameter are on the host: master weights, gradients and two moments.
    assert ways[0].host_bytes == 16 * 8_030_261_248
    with_room = changes_to_fit_run(describe_run("llama-3-70b", "8x8xH100-SXM", "zero2"))
    assert all(way.host_bytes == 0 for way in with_room)


def test_the_largest_micro_batch_that_fits_comes_first() -> None:
    asked: dict[str, Any] = {"recompute": "full", "loss": "chunked"}
    run = describe_run("llama-3-8b", "8xH100-SXM", **asked, micro_batch=128)
    found = int(changes_to_fit_run(run)[0].options.removeprefix("--micro-batch "))
    verdicts = [
        shardwise.estimate(
            "llama-3-8b", "8xH100-SXM", **asked, micro_batch=size
        ).known_memory.verdict
        for size in (found, 2 * found)
    ]
    assert verdicts[0] == "fits" != verdicts[1]


def test_chunks_come_first_where_logits_are_too_large() -> None:
    run = describe_run("llama-3-8b", "8xH100-SXM", recompute="full", micro_batch=16)
    assert estimate_run(run).known_memory.terms["logits"] > 20 * GIB
    assert changes_to_fit_run(run)[0].options == "--loss chunked"


def test_a_hundred_and_sixty_thousand_devices() -> None:
    run = describe_run("llama-3-8b", "20000x8xH100-SXM@400Gbps")
    assert estimate_run(run).cluster["devices"] == 160_000
    assert changes_to_fit_run(run)


def test_ddp_holds_less_than_five_billion_parameters_in_80_gb() -> None:
    # 16 bytes a parameter: 80 GB end before 5 B (published decision rules say 7 B).
    assert shardwise.estimate(
        "llama-3.2-3b", "8xH100-SXM", "ddp", seq_len=512, recompute="full"
    ).known_memory.fits
    assert not shardwise.estimate(
        "qwen2.5-7b", "8xH100-SXM", "ddp", seq_len=1, recompute="full"
    ).known_memory.fits


def test_the_verdict_has_three_answers() -> None:
    device = catalogue.devices()["H100-SXM"]
    assert verdict(40 * GIB, device) == "fits"
    assert verdict(78 * GIB, device) == "at risk"
    # 79.1 GiB, of which a process holds at least 0.5 outside the allocator.
    assert verdict(79 * GIB, device) == "does not fit"
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
    assert sum(profile.known_memory.terms.values()) == profile.known_memory.peak_allocated_bytes


def needed_by(command: list[str]) -> int:
    """What `estimate` with these options says is needed."""
    if not app.registered_commands:
        add_commands()
    result = CliRunner().invoke(app, ["estimate", *command, "--json"])
    assert result.exit_code in (0, 1), result.output
    return int(json.loads(result.stdout)["memory"]["needed_bytes"])


@pytest.mark.parametrize("seed", range(6))
def test_options_give_the_memory_they_state(seed: int) -> None:
    """Typed behind the command that was refused, of `estimate` or of `plan`."""
    rng = random.Random(seed)
    cluster = rng.choice(["1xH100-SXM", "8xRTX-4090", "8xA100-40GB", "2x8xL40S@100Gbps"])
    command = ["--model", rng.choice(["llama-3-8b", "llama-2-13b", "llama-3-70b"])]
    command += ["--cluster", cluster, "--seq-len", rng.choice(["2048", "8192"])]
    settings: dict[str, str] = {}
    if rng.random() < 0.5:
        settings["global_batch"] = "2M"
        command += ["--global-batch", "2M"]
    run = {"model": command[1], "cluster": cluster, "seq_len": command[5], **settings}
    ways = list(plan_run(**run)[0].ways)  # type: ignore[arg-type]
    for way in ways:
        assert needed_by([*command, *shlex.split(way.options)]) == way.needed_bytes, way
    kind = "single" if cluster[:2] == "1x" else rng.choice(["ddp", "zero2", "zero3"])
    own = ["--strategy", kind, "--micro-batch", "2", "--recompute", "selective"]
    described = describe_run(
        command[1], cluster, kind, seq_len=command[5], micro_batch=2, recompute="selective",
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    for way in changes_to_fit_run(described):
        assert needed_by([*command, *own, *shlex.split(way.options)]) == way.needed_bytes, way
        ways.append(way)
    assert ways
