"""Units from real modules: any architecture, tied weights, and sentences for what cannot work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardwise.spec.lookup import ModuleRef
from shardwise.spec.record import SpecError
from shardwise.units.decoder import decoder_units
from tests.gate import in_turn
from tests.units.reduced import build, reduced

pytest.importorskip("torch")
import torch
from torch import nn

from shardwise.pytorch.blocks import find_blocks, owners
from shardwise.units.module import module_units, traced_units


class Tower(nn.Module):
    """A CNN: no tokens, no attention, blocks of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, 2 * w, 1))
            for w in (8, 16, 32)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)))

    def example_inputs(self, batch: int, seq_len: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(batch, 3, 16, 16),)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)


@in_turn("family,dtype", ["gpt2", "llama", "qwen2", "qwen3", "gemma", "olmo2"], ["fp32", "bf16"])
def test_both_producers_tell_the_same_story(family: str, dtype: str) -> None:
    spec = reduced(family)
    formula = decoder_units(spec, 128, dtype)  # type: ignore[arg-type]
    traced = module_units(build(spec, attention="sdpa"), 128, dtype)  # type: ignore[arg-type]
    assert traced.numel == formula.numel
    assert traced.tied == formula.tied
    for ours, theirs in zip(formula.units, traced.units, strict=True):
        assert ours.numel == theirs.numel
        for shard in (1, 2, 3, 8, 100):
            assert ours.padded_numel(shard) == theirs.padded_numel(shard)
        assert ours.stage.matmul_flops == theirs.stage.matmul_flops
        assert ours.stage.attention_flops == theirs.stage.attention_flops
    for policy in ("none", "selective", "full"):
        ours_kept = formula.blocks[1].stage.kept[policy]  # type: ignore[index]
        their_kept = traced.blocks[1].stage.kept[policy]  # type: ignore[index]
        assert ours_kept.activation_bytes == pytest.approx(their_kept.activation_bytes, rel=0.01)
        assert ours_kept.recomputed_matmul_flops == their_kept.recomputed_matmul_flops
    assert formula.root.stage.kept["none"].logit_bytes == traced.root.stage.kept["none"].logit_bytes
    # The tallest moment of the backward: of a block, and of the loss.
    for ours, theirs in ((formula.blocks[1], traced.blocks[1]), (formula.root, traced.root)):
        tallest = [
            max(m.activation_bytes + m.logit_bytes for m in unit.stage.backward)
            for unit in (ours, theirs)
        ]
        assert tallest[0] == pytest.approx(tallest[1], rel=0.05)


def test_the_head_comes_after_the_blocks_and_a_tied_table_before() -> None:
    untied = module_units(build(reduced("llama"), attention="sdpa"), 64)
    assert {p.name for p in untied.root.parameters if p.after_blocks} == {
        "model.norm.weight",
        "lm_head.weight",
    }
    tied = module_units(build(reduced("llama", tied=True), attention="sdpa"), 64)
    assert {p.name for p in tied.root.parameters if p.after_blocks} == {"model.norm.weight"}
    assert tied.numel == untied.numel - 1000 * 256


def test_dropout_of_attention_is_drawn_inside_the_fused_kernel() -> None:
    """As on GPUs: no score of every pair of tokens is written or kept."""
    module = build(reduced("llama"), attention="sdpa")
    without = module_units(module, 64).blocks[0].stage
    module.config.attention_dropout = 0.1
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.1
    dropped = module_units(module, 64).blocks[0].stage
    assert dropped.kept["none"] == without.kept["none"]
    assert dropped.attention_flops == without.attention_flops


def test_a_cnn_has_units_too() -> None:
    units = module_units(Tower(), 1, "fp32")
    # 3x3 and 1x1 convolutions with biases, by hand; the stem and head are the root.
    by_hand = [9 * w * w + w + w * 2 * w + 2 * w for w in (8, 16, 32)]
    assert [block.numel for block in units.blocks] == by_hand
    assert units.root.numel == (27 * 8 + 8) + (64 * 10 + 10)
    pixels = 16 * 16
    first = units.blocks[0].stage
    assert first.matmul_flops == 2 * pixels * (9 * 8 * 8 + 8 * 16)
    # Two convolutions save their inputs (8 wide each), ReLU its output, which is one of them.
    assert first.kept["none"].activation_bytes == pytest.approx(2 * 8 * pixels * 4)


def test_blocks_are_found_by_structure() -> None:
    assert list(find_blocks(Tower())) == ["stages.0", "stages.1", "stages.2"]
    assert list(find_blocks(build(reduced("gpt2")))) == [
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
    ]
    # Experts are lists too, but inside the blocks.
    assert list(find_blocks(build(reduced("mixtral")))) == [f"model.layers.{i}" for i in range(3)]


def test_a_module_without_blocks_is_refused_with_a_sentence() -> None:
    with pytest.raises(SpecError, match="Plain has no list of repeated blocks"):
        find_blocks(Plain())


def test_a_tied_weight_belongs_to_the_root() -> None:
    module = build(reduced("gpt2"))
    owner = owners(module, find_blocks(module))
    assert owner["transformer.wte.weight"] == ""
    assert "lm_head.weight" not in owner
    assert owner["transformer.h.1.attn.c_attn.weight"] == "transformer.h.1"


def test_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "towers.py").write_text(
        "from tests.units.test_module import Tower\ndef make():\n    return Tower()\n"
        "def nothing():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert (
        traced_units(ModuleRef(factory="towers:make"), 1, "fp32").numel
        == module_units(Tower(), 1, "fp32").numel
    )
    with pytest.raises(SpecError, match="returned int, not an nn.Module"):
        traced_units(ModuleRef(factory="towers:nothing"), 1)
    with pytest.raises(SpecError, match="cannot import towers:missing"):
        traced_units(ModuleRef(factory="towers:missing"), 1)
    with pytest.raises(SpecError, match="cannot import nowhere:make"):
        traced_units(ModuleRef(factory="nowhere:make"), 1)
    sys.modules.pop("towers", None)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Positional(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class OnlyIds(Layers):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.run(input_ids)


class Odd(Layers):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.run(x) + y


def test_modules_of_other_people() -> None:
    for module in (Positional(), OnlyIds()):
        assert module_units(module, 8, "bf16").numel == 50 * 16 + 3 * (16 * 16 + 16)
    # Floating-point inputs are cast like a mixed-precision policy casts them.
    assert module_units(Tower(), 1, "bf16").numel == module_units(Tower(), 1, "fp32").numel
    with pytest.raises(SpecError, match="does not run on its example inputs"):
        module_units(Odd(), 8)


def test_a_class_that_computes_in_fp32_alone_is_told_so() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OpenAIGPTConfig(n_layer=2, n_embd=32, n_head=2, vocab_size=64)
    with torch.device("meta"):
        module = transformers.OpenAIGPTLMHeadModel(config)
    assert module_units(module, 16, "fp32").numel == sum(p.numel() for p in module.parameters())
    with pytest.raises(SpecError, match="--precision fp32"):
        module_units(module, 16, "bf16")


def test_a_module_that_looks_at_its_values_is_refused_with_a_sentence() -> None:
    class Curious(Tower):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            if image.sum() > 0:
                image = -image
            return super().forward(image)

    with pytest.raises(SpecError, match="cannot be traced without data"):
        module_units(Curious(), 1, "fp32")
