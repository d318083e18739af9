"""Which modules tensor parallelism divides, and what it and context parallelism refuse."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from shardwise.spec.adapter import Adapter
from shardwise.spec.families import DIVISIBLE, FAMILIES
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from tests.units.reduced import build, reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch import nn

from shardwise.engine.context import check_context
from shardwise.engine.tensor import TensorParallel, divided_modules
from shardwise.pytorch.adapted import adapt

SMALL: dict[str, Any] = {"hidden": 64, "heads": 4, "head_dim": 16, "ffn": 96, "vocab": 101}


def refusal(model: nn.Module, tensor: int) -> str:
    with pytest.raises(SpecError) as raised:
        divided_modules(model, tensor)
    return str(raised.value)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_exactly_the_divisible_families_are_divided(family: str) -> None:
    model = build(reduced(family, **{**SMALL, "kv_heads": 2 if family == "gemma" else 4}))
    if family == "gpt_neox":
        return  # The engine divides it, the formulas do not yet.
    if family not in DIVISIBLE:
        assert refusal(model, 2).startswith("strategy.tensor: ")
        return
    styles = divided_modules(model, 2)
    blocks = {name.split(".")[2] for name in styles if ".layers." in name}
    assert blocks == {"0", "1", "2"}
    matrices = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.ndim > 1}
    assert {name for name in styles if not name.endswith("norm")} >= matrices


@pytest.mark.parametrize(
    ("spec", "tensor", "reason"),
    [
        (reduced("llama", **SMALL), 4, "4 does not divide the 2 kv heads"),
        (reduced("llama", **{**SMALL, "kv_heads": 4}), 8, "8 does not divide the 4 attention"),
        (reduced("llama", **{**SMALL, "ffn": 97}), 2, "2 does not divide the width 97"),
        (reduced("gpt2", **SMALL), 2, "GPT2LMHeadModel has no plan"),
        (reduced("phi3", **SMALL), 2, "o_proj by 'rowwise_split_input'"),
        (reduced("mixtral", **SMALL), 2, "'moe_tp_experts', which is not supported"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused(spec: ModelSpec, tensor: int, reason: str) -> None:
    assert reason in refusal(build(spec), tensor)


def test_adapters_are_refused() -> None:
    model = adapt(build(reduced("llama", **SMALL)), Adapter(rank=4))
    assert "adapters" in refusal(model, 2)


class Own(nn.Module):
    """A module of one's own, with a table of patterns."""

    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


def test_a_module_can_bring_its_own_plan() -> None:
    expected = {f"blocks.{i}.{name}": style for i in (0, 1)
                for name, style in (("up", "colwise"), ("down", "rowwise"))}  # fmt: skip
    assert divided_modules(Own(), 2) == expected


def test_a_plan_with_gaps_is_refused() -> None:
    model = Own()
    model.extra = nn.Linear(8, 8)
    assert "leaves out extra" in refusal(model, 2)


def test_groups_to_reshard_to_are_refused() -> None:
    """Torch would wait for ever."""
    strategy = Strategy.read({"kind": "zero3", "tensor": 2, "reshard_after_forward": 2})
    with pytest.raises(SpecError, match=r"reshard_after_forward: a number does not work"):
        TensorParallel(build(reduced("llama", **SMALL)), strategy, mesh=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({"context": 3}, "cpu", "3 does not divide the 4 attention heads"),
        ({"context": 4, "tensor": 2}, "cpu", "the 2 attention heads that tensor 2 leaves"),
        ({"context": 2, "context_method": "ring"}, "cpu", "does not run on CPUs"),
    ],
    ids=str,
)
def test_context_that_cannot_be_is_refused(
    change: dict[str, Any], device: str, reason: str
) -> None:
    strategy = Strategy.read({"kind": "zero3", **change})
    model = build(reduced("llama", **SMALL), attention="sdpa")
    with pytest.raises(SpecError, match=reason):
        check_context(model, strategy, device)


def test_context_needs_attention_that_can_be_exchanged() -> None:
    strategy = Strategy.read({"kind": "zero3", "context": 2})
    with pytest.raises(SpecError, match="needs attn_implementation sdpa"):
        check_context(build(reduced("llama", **SMALL), attention="eager"), strategy, "cpu")
    with pytest.raises(SpecError, match="Own is not a model of transformers"):
        check_context(Own(), strategy, "cpu")
