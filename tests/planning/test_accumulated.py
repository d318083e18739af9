"""A plan without a batch, and the plan of the file that it writes."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.planning.api import changes_to_fit_run, plan_run
from shardwise.planning.reasons.limits import Alternative
from shardwise.planning.rows import Candidate
from shardwise.predict.api import estimate_run
from shardwise.spec.adapter import read_adapter
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.run import RunSpec


def planned(model: str, cluster: str) -> tuple[Candidate, RunSpec]:
    found, run = plan_run(model, cluster, in_full=False)
    assert run is not None
    assert found.winner is not None
    return found.winner, run


def planned_again(run: RunSpec) -> Candidate:
    found, _ = plan_run(run=run, in_full=False)
    assert found.winner is not None
    return found.winner


@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        # Memory holds less recomputation with smaller micro-batches.
        ("llama-3-8b", "8xH100-SXM"),
        # Other groups of devices are as fast.
        ("llama-3.2-1b", "2x8xH100-SXM@400Gbps"),
        # Its tensor groups leave smaller states untried.
        ("qwen2.5-14b", "8xA100-40GB"),
    ],
)
def test_a_plan_is_the_plan_of_its_own_file(model: str, cluster: str) -> None:
    first, run = planned(model, cluster)
    assert planned_again(run).strategy == first.strategy


def test_without_a_batch_tokens_are_accumulated_where_that_is_faster() -> None:
    """At once, they need what has less memory: more recomputation, or gathers in both passes."""
    first, _ = planned("llama-3-8b", "8xH100-SXM")
    assert first.strategy.accumulate > 1
    sequences = first.strategy.micro_batch * first.strategy.accumulate
    at_once = shardwise.plan("llama-3-8b", "8xH100-SXM", global_batch=8 * sequences * 4096)
    assert at_once.winner is not None
    assert at_once.winner.strategy == first.strategy


def test_a_current_configuration_is_left_for_a_clearly_faster_one_only() -> None:
    first, run = planned("llama-3.2-1b", "8xH100-SXM")
    alike = run._replace(strategy=run.strategy.but(prefetch=2))
    assert planned_again(alike).strategy == alike.strategy
    slower = run._replace(strategy=run.strategy.but(recompute="full"))
    again = planned_again(slower)
    assert again.strategy != slower.strategy
    assert again.tokens_per_s == pytest.approx(first.tokens_per_s, rel=0.05)


def test_an_adapter_that_does_not_fit_gets_a_smaller_base() -> None:
    run = describe_run("llama-3-70b", "1xH100-SXM", "single", adapter="lora:16", seq_len=2048)
    way = next(w for w in changes_to_fit_run(run) if "--adapter" in w.options)
    words = way.options.split()
    assert words[words.index("--adapter") + 1] == "qlora:16"
    recompute = "full" if "full" in words else "none"
    assert isinstance(run.model, ModelSpec)
    smaller = run._replace(
        model=run.model.but(adapter=read_adapter("qlora:16")),
        strategy=run.strategy.but(recompute=recompute),
    )
    memory = estimate_run(smaller).known_memory
    assert memory.verdict == "fits"
    assert way.needed_bytes == memory.needed_bytes


def test_what_keeps_training_all_weights_comes_before_adapters() -> None:
    found = shardwise.plan("llama-3-70b", "8xH100-SXM")
    changes = [tip.change for tip in found.tips if isinstance(tip, Alternative)]
    assert "adapter" in changes
    assert "offload" in changes
    assert changes == sorted(changes, key=lambda change: change == "adapter")
