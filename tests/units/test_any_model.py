"""Models of every kind that transformers has, traced at full size without a formula."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.predict.api import estimate_run
from shardwise.pytorch.example_inputs import example_inputs
from shardwise.pytorch.from_config import model_from_config
from shardwise.pytorch.private import FakeTensorMode
from shardwise.spec.adapter import read_adapter
from shardwise.spec.catalogue import traced
from shardwise.spec.lookup import find_model
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.trainer.admit import check_can_train
from shardwise.units import module as tracing
from shardwise.units.load import load_units
from shardwise.units.module import module_units
from shardwise.units.unit import ModelUnits

CONFIGS = sorted(Path(__file__).parents[3].joinpath("shared/advice/configs").glob("*.json"))
# No models of transformers: a diffusion model.
OTHERS = ("flux",)
# Small, with two kinds of blocks each: windows, and no rotary positions in every fourth.
SMALL: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 7, "sliding_window": 64, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "smollm3": {"num_hidden_layers": 9, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_oss": {
        "num_hidden_layers": 6, "sliding_window": 64, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def built(table: dict[str, Any], *attention: str) -> Any:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_from_config(table, "model", attention or ("sdpa", "eager"))


def small(kind: str) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 160, "pad_token_id": 0}
    return built({"model_type": kind, **sizes, **SMALL[kind]})


def as_lists(units: ModelUnits) -> list[Any]:
    """The parameters and all numbers of each block's stage and of the root's."""
    return [(unit.parameters, dataclasses.asdict(unit.stage)) for unit in units.units]


@pytest.mark.parametrize("kind", SMALL)
def test_a_trace_of_each_kind_of_block_equals_one_of_all_blocks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small(kind)
    short = module_units(module, 256)
    assert len({id(block) for block in short.blocks}) == 2
    monkeypatch.setattr(tracing, "repeated_blocks", lambda *_: {})
    full = module_units(module, 256)
    assert as_lists(short) == as_lists(full)


def test_a_window_is_told_to_attention_and_only_there() -> None:
    units = module_units(small("gpt_oss"), 256)
    assert [block.stage.attention_span for block in units.blocks] == [64, 256] * 3
    narrow, full = (units.blocks[i].stage.attention_flops for i in (0, 1))
    assert narrow == pytest.approx(full * 64 / 256)


def flops_per_token(table: dict[str, Any], seq_len: int) -> float:
    """FLOPs of a forward by torch's own counter, all blocks run, without data.

    Attention and experts as plain products of matrices, which that counter knows on a CPU.
    """
    module = built(table, "eager")
    module.config._experts_implementation = "batched_mm"
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = {
            name: torch.empty(tensor.shape, dtype=_kind(tensor), device="cpu")
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        inputs: Any = example_inputs(module, 2, seq_len, torch.bfloat16)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            torch.func.functional_call(module.eval(), fake, (), dict(inputs))
    return counter.get_total_flops() / (2 * seq_len)


def _kind(tensor: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype


GATE = ("olmoe-1b-7b", "bert-large")


def _marked(path: Path) -> Any:
    return pytest.param(
        path, id=path.stem, marks=() if path.stem in GATE else (pytest.mark.nightly,)
    )


@pytest.mark.skipif(not CONFIGS, reason="needs the model configurations in ../shared/advice")
@pytest.mark.parametrize("path", [_marked(p) for p in CONFIGS if p.stem not in OTHERS])
def test_parameters_and_flops_are_those_of_transformers_and_torch(path: Path) -> None:
    table = json.loads(path.read_text())
    module = built(table)
    seq_len = 197 if module.main_input_name == "pixel_values" and "vit" in path.stem else 128
    units = module_units(module, seq_len)
    assert units.parameters == sum(p.numel() for p in module.parameters())
    assert units.trained_numel == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert units.forward_flops() == pytest.approx(flops_per_token(table, seq_len), rel=0.01)


def test_a_kept_trace_is_found_and_equals_a_fresh_one_between_its_lengths(tmp_path: Path) -> None:
    config = json.loads(traced.config_file("smollm3-3b").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    model = find_model(str(tmp_path))
    kept = load_units(model, 3072, Strategy(kind="zero3"))
    fresh = module_units(built(config), 3072)
    assert kept.parameters == fresh.parameters
    assert kept.forward_flops() == pytest.approx(fresh.forward_flops(), rel=1e-6)
    for ours, theirs in zip(kept.units, fresh.units, strict=True):
        assert ours.parameters == theirs.parameters
        assert ours.stage.kept["none"] == pytest.approx(theirs.stage.kept["none"], rel=1e-4)
        assert ours.stage.backward[0][:2] == pytest.approx(theirs.stage.backward[0][:2], rel=1e-4)


def test_every_published_configuration_finds_its_own_kept_trace() -> None:
    """A folder downloaded from a hub has what is in our files, and is planned without torch."""
    configs = {name: json.loads(traced.config_file(name).read_text()) for name in traced.names()}
    assert {name: traced.matching(config) for name, config in configs.items()} == {
        name: name for name in configs
    }


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"eos_token_id": 3, "transformers_version": "5.0.0"}, True),
        ({"hidden_size": 1024}, False),
        ({"num_hidden_layers": None}, False),
        ({"a_key_of_next_year": 1}, False),
    ],
)
def test_a_kept_trace_is_only_used_for_the_same_computation(
    change: dict[str, Any], same: bool
) -> None:
    config = {**json.loads(traced.config_file("gpt-oss-20b").read_text()), **change}
    given = {key: value for key, value in config.items() if value is not None}
    assert traced.matching(given) == ("gpt-oss-20b" if same else None)


@pytest.mark.parametrize(
    ("adapter", "seq_len", "dtype"),
    [("lora:16", 1024, "bf16"), (None, 100_000, "bf16"), (None, 1024, "fp32")],
)
def test_without_torch_a_kept_trace_says_what_it_covers(
    adapter: str | None, seq_len: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.units.load.find_spec", lambda _: None)
    model = find_model("gemma-3-4b")
    strategy = Strategy.read({"kind": "zero3", "param_dtype": "bf16"})
    assert load_units(model, 1024, strategy).parameters > 4e9
    if adapter is not None:
        model = model.but(adapter=read_adapter(adapter))
    with pytest.raises(SpecError, match="trace of gemma-3-4b .* 256 to 32,768 tokens"):
        load_units(model, seq_len, Strategy.read({"kind": "zero3", "param_dtype": dtype}))


def test_lengths_that_a_model_has_no_positions_for_are_refused() -> None:
    table = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 2}
    with pytest.raises(SpecError, match="exceeds the 512 learned positions"):
        module_units(built(table), 513)
    image = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    with pytest.raises(SpecError, match="an image of ViTForImageClassification is 197 tokens"):
        module_units(built(image), 128)


def test_a_model_that_predicts_no_next_token_is_planned_but_not_trained(tmp_path: Path) -> None:
    table = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(table))
    run = describe_run(str(tmp_path), "2xCPU", seq_len=64)
    assert estimate_run(run).known_memory.fits
    with pytest.raises(SpecError, match=r"BertForMaskedLM.*does not predict the next token"):
        check_can_train(run, 2, 2)
