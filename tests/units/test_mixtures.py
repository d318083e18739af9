"""The catalogue's mixtures of experts: parameters, active parameters and FLOPs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from shardwise.report.catalog import entries
from shardwise.spec import catalogue
from shardwise.spec.catalogue import traced
from shardwise.spec.huggingface import to_config
from shardwise.units.active import is_stacked
from shardwise.units.decoder import decoder_units
from shardwise.units.kept_trace import kept_units
from shardwise.units.unit import ModelUnits

SEQ = 256


class Card(NamedTuple):
    """What authors publish: parameters and active ones in billions, to the digits printed."""

    parameters: str
    active: str
    # Tables of the vocabulary that the authors leave out of the active parameters.
    without: tuple[str, ...] = ()


EMBEDDING = ("embed",)
TABLES = ("embed", "head")
# From model cards and technical reports. GLM counts a layer for the prediction of further tokens.
CARDS = {
    "mixtral-8x7b": Card("46.7", "12.9"),
    "mixtral-8x22b": Card("141", "39"),
    "qwen3-30b-a3b": Card("30.5", "3.3"),
    "qwen3-235b-a22b": Card("235", "22"),
    "deepseek-v2-lite": Card("15.7", "2.4", EMBEDDING),
    "deepseek-v3": Card("671", "37", EMBEDDING),
    "glm-4.5-air": Card("106", "12", TABLES),
    "glm-4.5": Card("355", "32", TABLES),
    "gpt-oss-20b": Card("20.91", "3.61", EMBEDDING),
    "gpt-oss-120b": Card("116.83", "5.13", EMBEDDING),
    "kimi-k2": Card("1000", "32", EMBEDDING),
    "llama-4-scout": Card("109", "17", EMBEDDING),
    "llama-4-maverick": Card("400", "17", EMBEDDING),
    "olmoe-1b-7b": Card("6.9", "1.3"),
    "qwen3-next-80b": Card("80", "3", TABLES),
}


def within_print(count: float, printed: str) -> bool:
    """Whether a count is what was printed, rounded or cut to its digits."""
    step = 10.0 ** -len(printed.partition(".")[2])
    return -step / 2 <= count / 1e9 - float(printed) < step


def units_of(name: str) -> ModelUnits:
    kept = traced.named(name)
    found = kept_units(kept, SEQ, "bf16") if kept else decoder_units(catalogue.model(name), SEQ)
    assert found is not None
    return found


def config_of(name: str) -> dict[str, Any]:
    kept = traced.named(name)
    if kept is None:
        return dict(to_config(catalogue.model(name)))
    return dict(json.loads(traced.config_file(kept).read_text()))


def tables(name: str, left_out: tuple[str, ...]) -> int:
    return sum(
        parameter.numel
        for parameter in units_of(name).root.parameters
        if len(parameter.shape) == 2 and any(word in parameter.name for word in left_out)
    )


def test_every_mixture_of_the_catalogue_is_compared() -> None:
    assert {entry["name"] for entry in entries("models") if "active" in entry} == set(CARDS)
    assert len(CARDS) >= 12


@pytest.mark.parametrize("name", CARDS)
def test_active_parameters_are_those_of_the_model_card(name: str) -> None:
    card = CARDS[name]
    entry = entries("models", name)[0]
    assert within_print(entry["active"] - tables(name, card.without), card.active)
    assert entry["parameters"] / 1e9 == pytest.approx(float(card.parameters), rel=0.03)


@pytest.mark.nightly  # the gate compares one of them, in test_any_model
@pytest.mark.parametrize("name", CARDS)
def test_counts_and_flops_are_those_of_transformers_and_torch(name: str) -> None:
    from tests.units.test_any_model import built, flops_per_token

    config, units = config_of(name), units_of(name)
    module = built(config)
    text = module.config.get_text_config()
    parameters = dict(module.named_parameters())
    assert units.parameters == sum(parameter.numel() for parameter in parameters.values())
    # transformers' own modules say how many experts they hold.
    idle = sum(
        parameter.numel() * (1 - text.num_experts_per_tok / len(parameter))
        for owner in module.modules()
        if hasattr(owner, "num_experts") and "Experts" in type(owner).__name__
        for parameter in owner.parameters(recurse=False)
    )
    assert entries("models", name)[0]["active"] == units.parameters - round(idle)
    assert sum(map(is_stacked, (p for b in units.blocks for p in b.parameters))) > 0
    assert units.forward_flops() == pytest.approx(flops_per_token(config, SEQ), rel=0.01)
