"""Published runs with expert parallelism: how they are read."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from benchmarks.expert_runs import (
    MODELS,
    Published,
    cluster_of,
    copies_of,
    model_of,
    published,
    read_experts,
    row_of,
    split_of,
    strategy_of,
)
from shardwise.predict.intervals import RUNS_WITH_EXPERTS
from shardwise.units.decoder import decoder_units

EVERY = [run for run in published(("fit", "heldout")) if run.model in MODELS]


def run_of(stack: str, model: str, gpu: str) -> Published:
    return next(run for run in EVERY if (run.stack, run.model, run.gpu) == (stack, model, gpu))


def test_the_split_is_frozen() -> None:
    """A stack, a model and a device are on one side; a new row cannot move an old one."""
    sides = Counter(run.split for run in EVERY)
    assert sides == {"fit": 21, "heldout": 39}
    assert split_of("AutoModel", "Qwen3 MoE 30B", "H100") == "fit"
    assert split_of("Megatron-Bridge", "Qwen3_30B_a3B", "B200") == "heldout"
    # Rows of the table of 2024 to 2026 stay on the side where that table has them.
    own = [run for run in EVERY if not run.id.startswith("msc")]
    groups = {(run.stack, run.model, run.gpu): run.split for run in own}
    assert all(groups[run.stack, run.model, run.gpu] == run.split for run in own)


def test_a_run_is_what_its_table_and_its_configuration_say() -> None:
    run = run_of("AutoModel", "Qwen3 MoE 30B", "H100")
    strategy = strategy_of(run)
    assert (strategy.kind, strategy.expert, strategy.micro_batch) == ("zero2", 8, 4)
    assert (strategy.accumulate, strategy.recompute) == (16, "full")
    assert run.tokens_per_s == 12040
    assert run.settings is not None
    assert run.settings.upper_bound
    # 512 sequences of 4,096 in the 21.773 s that the same row prints.
    assert run.tokens_per_s * run.gpus == pytest.approx(512 * 4096 / 21.773, rel=1e-3)


def test_screens_say_how_many_runs_were_predicted() -> None:
    rows, _ = read_experts(("fit", "heldout"))
    assert len(rows) == RUNS_WITH_EXPERTS
    assert all(run.settings.upper_bound for run in EVERY if run.settings is not None)


def test_racks_are_one_domain_of_nvlink() -> None:
    assert cluster_of(run_of("Megatron-Bridge", "GPT OSS 120B", "GB200")).nodes == 1
    assert cluster_of(run_of("Megatron-Bridge", "GPT OSS 120B", "B200")).nodes == 8


def test_forced_routing_decides_how_far_tokens_travel() -> None:
    """AutoModel gives a token eight neighbours of 128 experts, all on one of 8 ranks."""
    neighbours = run_of("AutoModel", "Qwen3 MoE 30B", "H100")
    assert copies_of(neighbours, 8)(128, 8) == 1.0
    drawn = run_of("Megatron-Bridge", "Qwen3_30B_a3B", "GB300")
    none_of_a_rank = math.comb(128 - 16, 8) / math.comb(128, 8)
    assert copies_of(drawn, 8)(128, 8) == pytest.approx(8 * (1 - none_of_a_rank))
    # Four neighbours of 128 experts on 64 ranks are on two ranks, of one node.
    far = run_of("AutoModel", "GPT-OSS 120B", "H100")
    assert (copies_of(far, 64)(128, 4), copies_of(far, 8)(128, 4)) == (2.0, 1.0)


def test_settings_are_those_of_the_release() -> None:
    ways = {
        run.release: (run.settings.dispatcher, run.settings.overlapped)
        for run in EVERY
        if (run.model, run.gpu) == ("GPT OSS 120B", "GB200") and run.settings is not None
    }
    assert ways["26.02"] == ("all-to-all", False)
    assert ways["26.08"] == ("HybridEP", True)


def test_a_row_sends_the_copies_that_its_dispatcher_sends() -> None:
    """Bytes of a token in a forward: each way once for each rank, of 2,048 values in 16 bits."""
    for stack, gpu, copies in (("AutoModel", "H100", 1.0), ("Megatron-Bridge", "B300", None)):
        model = "Qwen3 MoE 30B" if stack == "AutoModel" else "Qwen3_30B_a3B"
        run = next(
            one
            for one in EVERY
            if (one.stack, one.model, one.gpu) == (stack, model, gpu)
            and one.settings is not None
            and not one.settings.overlapped
        )
        exchanges = row_of(run).units.blocks[0].stage.exchanges.forward
        sent = sum(one.bytes for one in exchanges if one.axis == "expert" and not one.host)
        assert sent == pytest.approx(2 * 2048 * 2 * (copies or copies_of(run, 8)(128, 8)))


def test_the_shape_of_gpt_oss_is_that_of_its_card() -> None:
    for run, billions in (("GPT-OSS 120B", 116.83), ("GPT-OSS 20B", 20.91)):
        units = decoder_units(model_of(run_of("AutoModel", run, "H100")), 4096)
        assert units.parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("run", EVERY, ids=lambda run: run.id)
def test_every_run_that_a_form_may_cover_has_settings_with_a_source(run: Published) -> None:
    covered = run.tensor * run.context == 1 and "dropped" not in run.model
    assert run.gpus % (run.expert or 1) == 0
    assert not covered or (run.settings is not None and run.settings.source.startswith("github:"))
    assert run.sequences % (run.gpus * run.micro_batch) == 0 or not covered
