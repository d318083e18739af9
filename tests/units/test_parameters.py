"""Parameter counts: formulas, the modules transformers builds, and published numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.spec import catalogue
from shardwise.spec.model import ModelSpec
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import Unit
from tests.units.reduced import build

# Built whole on the meta device, from 100 M to 405 B parameters.
WHOLE = [
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "llama-2-7b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "llama-3.2-1b",
    "mistral-7b",
    "mixtral-8x7b",
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "gemma-2b",
    "gemma-2-9b",
    "gemma-3-1b",
    "mpt-7b",
    "olmo-7b",
    "olmo-2-7b",
    "phi-2",
    "phi-4",
    "opt-1.3b",
    "pythia-1.4b",
]
# As the authors or the safetensors index of the model give them.
PUBLISHED = {
    "gpt2-large": 774_030_080,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "gemma-2b": 2_506_172_416,
    "phi-2": 2_779_683_840,
    "phi-4": 14_659_507_200,
}


def units(spec: ModelSpec):  # type: ignore[no-untyped-def]
    return decoder_units(spec, min(512, spec.max_positions))


def shapes(unit: Unit) -> Counter[tuple[int, ...]]:
    return Counter(parameter.shape for parameter in unit.parameters)


@pytest.mark.nightly  # in the gate, unit by unit
@pytest.mark.parametrize("name", WHOLE)
def test_the_count_is_that_of_transformers_exactly(name: str) -> None:
    spec = catalogue.model(name)
    module = build(spec)
    assert units(spec).numel == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_the_count_is_the_published_one(name: str, count: int) -> None:
    assert units(catalogue.model(name)).numel == count


def test_gpt2_by_hand() -> None:
    # V·d + T·d + L·(12·d² + 13·d) + 2·d
    d, layers, vocab, positions = 1280, 36, 50257, 1024
    by_hand = vocab * d + positions * d + layers * (12 * d * d + 13 * d) + 2 * d
    assert units(catalogue.model("gpt2-large")).numel == by_hand == 774_030_080


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("1.3b", 1.21),
        ("7b", 6.44),
        ("13b", 12.58),
        ("30b", 29.60),
        ("66b", 65.23),
        ("175b", 173.95),
        ("310b", 309.24),
    ],
)
def test_round_shapes_have_twelve_squares_a_block(name: str, billions: float) -> None:
    spec = catalogue.model(f"shape-{name}")
    blocks = sum(block.numel for block in units(spec).blocks)
    assert 12 * spec.layers * spec.hidden**2 == pytest.approx(billions * 1e9, rel=0.005)
    # Beyond the squares there are only biases and norms: 13 per block and column.
    assert blocks - 12 * spec.layers * spec.hidden**2 == 13 * spec.layers * spec.hidden


@pytest.mark.parametrize("name", catalogue.model_names())
def test_unit_by_unit_the_formulas_and_the_module_agree(name: str) -> None:
    from shardwise.pytorch.blocks import find_blocks, owners

    spec = catalogue.model(name).but(layers=2)
    formulas = units(spec)
    module = build(spec)
    blocks = find_blocks(module)
    owner = owners(module, blocks)
    by_unit: dict[str, Counter[tuple[int, ...]]] = {}
    for parameter, unit in owner.items():
        by_unit.setdefault(unit, Counter())[tuple(module.get_parameter(parameter).shape)] += 1
    assert shapes(formulas.root) == by_unit[""]
    for block, block_name in zip(formulas.blocks, blocks, strict=True):
        assert shapes(block) == by_unit[block_name]


def test_padding_follows_the_rows_of_each_tensor() -> None:
    block = units(catalogue.model("gpt2")).blocks[0]
    # 768 and 3072 rows divide by 2 and 4; over 1,000 devices each row takes a device.
    assert block.padded_numel(2) == block.numel
    assert block.padded_numel(4) == block.numel
    by_hand = sum(-(-p.shape[0] // 1000) * 1000 * (p.numel // p.shape[0]) for p in block.parameters)
    assert block.padded_numel(1000) == by_hand > block.numel


def test_experts_are_divided_where_nothing_is_padded() -> None:
    spec = catalogue.model("mixtral-8x7b")
    block = units(spec).blocks[0]
    # Eight experts over 64 devices: each is divided, instead of 56 that are not there added. The
    # router is, as fully_shard pads it.
    assert block.padded_numel(64) - block.numel == (64 - 8) * spec.hidden
    # 48 devices divide neither the experts nor their rows.
    assert block.padded_numel(48) - block.numel >= (48 - 8) * spec.ffn * spec.hidden
