"""Which models have experts that can be divided."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from torch import nn

from shardwise.engine.expert import check_experts, stacked_experts
from tests.distributed.expert_models import FAMILIES, build


class Own(nn.Module):
    """Experts that are called with tokens sorted by expert, as some models have them."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.zeros(4, 2, 2))
        self.bias = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, tokens: Any, counts: Any) -> Any:
        return tokens, counts


class Called(Own):
    def forward(self, tokens: Any, chosen: Any, weights: Any) -> Any:  # type: ignore[override]
        return tokens, chosen, weights


def check(model: nn.Module, expert: int) -> None:
    check_experts(model, Strategy(kind="zero3", expert=expert))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_found_and_routers_are_not(family: str) -> None:
    model = build(family)
    found = dict(stacked_experts(model))
    assert {name.rpartition(".")[2] for name in found} == {"experts"}
    # In every block but the first of DeepSeek-V3.
    assert len(found) == 2
    check(model, 2)
    check(model, 8)


def test_a_degree_must_divide_the_experts() -> None:
    check(Called(), 2)
    with pytest.raises(SpecError, match="does not divide the 4 experts"):
        check(Called(), 3)


def test_adapters_of_experts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_parameters=["experts.gate_up_proj"])
    adapted = peft.get_peft_model(build("mixtral", device="cpu"), settings)
    with pytest.raises(SpecError, match="has adapters"):
        check(adapted, 2)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Own(), Called(rows=3)], ids=str)
def test_models_without_divisible_experts_are_refused(model: nn.Module) -> None:
    with pytest.raises(SpecError, match=r"strategy\.expert"):
        check(model, 2)
