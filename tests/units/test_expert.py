"""Experts divided among devices: parameters, FLOPs and what travels, by arithmetic."""

from __future__ import annotations

import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import predict_memory
from shardwise.predict.work import predict_work
from shardwise.spec.lookup import find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units
from shardwise.units.unit import ModelUnits

SEQ_LEN = 4096


def divided(model: str, expert: int, routing: float = 1.0) -> tuple[ModelUnits, Strategy]:
    strategy = Strategy(kind="zero3", expert=expert).resolve(16, 8)
    return load_units(find_model(model), SEQ_LEN, strategy, routing), strategy


def experts_numel(units: ModelUnits) -> int:
    return sum(p.numel for block in units.blocks for p in block.parameters if p.expert)


# Formulas, and kept traces: with biases; with dense blocks and shared experts.
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"])
@pytest.mark.parametrize("expert", [2, 8])
def test_devices_of_a_group_hold_all_experts_once(model: str, expert: int) -> None:
    whole, _ = divided(model, 1)
    part, _ = divided(model, expert)
    experts = experts_numel(part)
    assert part.parameters == whole.numel
    assert part.numel == whole.numel - (expert - 1) * experts
    # Most parameters of these models are in their experts.
    assert expert * experts > 0.8 * whole.numel


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"])
def test_parts_are_the_whole_block(model: str) -> None:
    whole, strategy = divided(model, 1)
    part, divided_strategy = divided(model, 8)
    flops = [
        predict_work(units, Configurations.of([one]))
        for units, one in ((whole, strategy), (part, divided_strategy))
    ]
    assert flops[1].model_flops == pytest.approx(flops[0].model_flops, rel=1e-9)
    for block in part.blocks:
        if block.stage.parts:
            for name in ("matmul_flops", "attention_flops", "backward_flops"):
                total = sum(getattr(one, name) for one in block.stage.parts)
                assert total == pytest.approx(getattr(block.stage, name), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "hidden", "chosen"), [("qwen3-30b-a3b", 2048, 8), ("deepseek-v3", 7168, 8)]
)
def test_tokens_travel_to_their_experts_and_back(model: str, hidden: int, chosen: int) -> None:
    units, _ = divided(model, 8)
    [experts] = [part for part in units.blocks[-1].stage.parts if part.of_experts]
    there_and_back = 2 * 2.0 * chosen * hidden
    for run in (experts.exchanges.forward, experts.exchanges.backward):
        assert sum(one.bytes for one in run) == there_and_back
        assert sum(one.calls for one in run if not one.host) == 2
    # Counts of 8 bytes an expert, whatever the tokens.
    count = {"qwen3-30b-a3b": 128, "deepseek-v3": 256}[model]
    assert [one.fixed for one in experts.exchanges.forward if one.host] == [8 * count]


def test_a_stated_skew_is_that_of_the_worst_device() -> None:
    """More memory and FLOPs on the device, but not in the model's FLOPs."""
    found = {}
    for routing in (1.0, 2.0):
        units, strategy = divided("qwen3-30b-a3b", 8, routing)
        columns = Configurations.of([strategy])
        [experts] = [part for part in units.blocks[0].stage.parts if part.of_experts]
        work = predict_work(units, columns)
        memory = float(predict_memory(units, columns).peak_bytes[0])
        found[routing] = (experts.matmul_flops, memory, work.model_flops[0])
    assert found[2.0][0] == 2 * found[1.0][0]
    assert found[2.0][1] > found[1.0][1]
    assert found[2.0][2] == pytest.approx(found[1.0][2], rel=1e-9)


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(SpecError, match="expert"):
        divided("llama-3-8b", 2)
    assert isinstance(find_model("llama-3-8b"), ModelSpec)
