"""Divided experts are gathered ahead before the host waits for counts of tokens, as predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.predict.api import estimate_run
from shardwise.predict.configurations import Configurations
from shardwise.predict.program.events import Run
from shardwise.predict.program.step import emit_steps
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.division import Division
from tests.distributed.workers import Workers
from tests.predict.blocks import unrolled
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.expert_order_run import ordered

SEQ_LEN = 64
SIZES: dict[str, Any] = {"layers": 3, "hidden": 64, "head_dim": 16, "ffn": 96, "vocab": 512}
SPEC = reduced("qwen3_moe", experts=8, experts_per_token=2, **SIZES)
PROCESSES, EXPERT = 4, 2
# Full collectives of the forward, before gradients are reduced.
FORWARD = ("all_gather", "all_to_all")


def strategy_of(forward_prefetch: int, **settings: Any) -> Strategy:
    return Strategy(
        kind="zero3", expert=EXPERT, forward_prefetch=forward_prefetch, **settings
    ).resolve(PROCESSES, PROCESSES)


def predicted(spec: ModelSpec, strategy: Strategy) -> list[tuple[str, str]]:
    """Operation and axis of each collective of a step on CPUs, in order."""
    units = decoder_units(
        spec, SEQ_LEN, strategy.param_dtype, division=Division.of(strategy)
    ).grouped(strategy.blocks_per_unit)
    [part] = emit_steps(units, Configurations.of([strategy]), waits=True).parts
    return [
        (event.work.replace("-", "_"), event.message.axis)
        for event in unrolled(part.program)
        if isinstance(event, Run) and event.message is not None
        if event.only is None or event.only[0]
        for _ in range(int(np.broadcast_to(event.message.calls, 1)[0]))
    ]


def test_experts_ahead_are_gathered_before_the_host_waits(workers: Workers) -> None:
    strategies = [strategy_of(ahead) for ahead in (0, 1, 2)]
    cases = [
        {
            "model": SPEC.model_dump(mode="json"),
            "strategy": strategy.model_dump(mode="json"),
            "seq_len": SEQ_LEN,
        }
        for strategy in strategies
    ]
    results = workers.run(ordered, PROCESSES, cases)
    parameters = []
    for strategy, ranks in zip(strategies, results, strict=True):
        expected = predicted(SPEC, strategy)
        for rank in ranks:
            calls = [(op, axis) for op, axis, _ in rank["calls"]]
            assert calls == expected
        parameters.append([rank["parameters"] for rank in ranks])
    # The same to the last bit.
    assert parameters[0] == parameters[1] == parameters[2]


@pytest.mark.parametrize(("ahead", "gathered"), [(0, 1), (1, 2), (2, 3)])
def test_gathers_of_experts_before_the_first_wait(ahead: int, gathered: int) -> None:
    """One block's experts, and those of each block within reach."""
    order = predicted(SPEC, strategy_of(ahead))
    before = order[: order.index(("all_to_all", "expert"))]
    assert before.count(("all_gather", "expert_shard")) == gathered


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_gathers_ahead_save_time_where_the_host_runs_ahead(model: str) -> None:
    """Also where the first blocks have no experts."""
    steps = []
    for ahead in (0, 1, 2):
        run = describe_run(
            model, "32x8xB200@400Gbps", seq_len=4096, expert=16, forward_prefetch=ahead
        )
        time = estimate_run(run).time
        assert time is not None
        steps.append(time.step_s)
    assert steps[1] < steps[0]
    assert steps[2] == pytest.approx(steps[1], rel=0.01)
