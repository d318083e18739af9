from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec import catalogue, lookup
from shardwise.spec.huggingface import (
    from_config,
    read_config,
    to_config,
    trains_text,
    without_formulas,
)
from shardwise.spec.lookup import ConfigRef, ModuleRef, find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError, SpecWarning

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
}


def same(one: ModelSpec, other: ModelSpec) -> bool:
    ignored = {"name", "source", "dropout"}
    return one.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)


def test_a_config_is_the_preset_it_came_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert same(read_config(tmp_path), catalogue.model("llama-3-8b"))
    assert same(read_config(tmp_path / "config.json"), catalogue.model("llama-3-8b"))


@pytest.mark.parametrize("name", catalogue.model_names())
def test_every_preset_survives_the_trip_through_a_config(name: str) -> None:
    model = catalogue.model(name)
    assert same(from_config(to_config(model)), model)


@pytest.mark.parametrize(
    "name", [name for name in catalogue.model_names() if catalogue.model(name).rope_theta]
)
def test_transformers_turns_positions_by_the_angles_of_a_preset(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = catalogue.model(name)
    config = transformers.AutoConfig.for_model(**to_config(model))
    assert config.rope_parameters["rope_theta"] == model.rope_theta


def test_angles_are_read_where_newer_configurations_have_them() -> None:
    newer = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    model = from_config({**newer, "rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}})
    assert model.rope_theta == 7e4


def test_defaults_a_config_may_leave_out() -> None:
    short = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    model = from_config({**short, "n_positions": 1024})
    assert (model.ffn, model.tied, model.kv_heads, model.head_dim) == (3072, True, 12, 64)


def test_a_text_model_inside_a_multimodal_one() -> None:
    inner = to_config(catalogue.model("gemma-3-27b"))
    model = from_config({"model_type": "gemma3", "text_config": inner})
    assert same(model, catalogue.model("gemma-3-27b"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "no formulas for model type 'deepseek_v3'"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu' is not modelled"),
        ({"num_key_value_heads": 5}, "multiple of kv_heads"),
        ({"hidden_size": "wide"}, "model.hidden: cannot read 'wide'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        from_config({**LLAMA, **change})


def test_a_setting_the_formulas_do_not_describe_is_refused() -> None:
    config = {**to_config(catalogue.model("opt-125m")), "do_layer_norm_before": False}
    with pytest.raises(SpecError, match="do_layer_norm_before=False is not modelled"):
        from_config(config)


@given(
    st.dictionaries(
        st.sampled_from(sorted(LLAMA)),
        st.none()
        | st.booleans()
        | st.integers(-5, 5000)
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2),
    )
)
def test_mutated_configs_never_crash(change: dict[str, object]) -> None:
    try:
        assert from_config({**LLAMA, **change}).layers >= 1
    except SpecError as error:
        assert error.problems


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x00", '{"a": ' * 20000])
def test_a_file_that_is_no_config_is_one_sentence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(SpecError):
        read_config(file)


def test_models_are_found_by_name_path_or_factory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert find_model("llama-3-8b") == catalogue.model("llama-3-8b")
    assert isinstance(find_model(str(tmp_path)), ModelSpec)
    assert find_model("package.models:tiny") == ModuleRef(factory="package.models:tiny")
    with pytest.raises(SpecError, match="no file or folder"):
        find_model("missing/config.json")


# Model types without formulas: whether transformers builds a causal language model of them.
WITHOUT_FORMULAS = {
    "t5": ("T5ForConditionalGeneration", False),
    "bert": ("BertForMaskedLM", False),
    "vit": ("ViTForImageClassification", False),
    "mamba": ("MambaForCausalLM", True),
    "deepseek_v3": ("DeepseekV3ForCausalLM", True),
    "gpt_oss": ("GptOssForCausalLM", True),
}


@pytest.mark.parametrize("kind", WITHOUT_FORMULAS)
def test_a_type_without_formulas_says_what_traces_it(kind: str) -> None:
    name, causal = WITHOUT_FORMULAS[kind]
    config = {"model_type": kind, "architectures": [name]}
    assert trains_text(config) is causal
    message = without_formulas(config)
    assert f"'{kind}'" in message
    assert "shardwise[hf]" in message


def test_without_architectures_nobody_knows() -> None:
    assert trains_text({"model_type": "mamba"}) is None


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_quantization_config_is_not_ignored_silently(tmp_path: Path, kind: str) -> None:
    config = {**LLAMA, "model_type": kind, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(SpecWarning, match=r"quantization_config \(fp8\)"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("torch", [False, True])
def test_what_is_planned_of_a_multimodal_model_is_said(
    tmp_path: Path, torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = to_config(catalogue.model("gemma-3-27b"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": inner})
    )
    monkeypatch.setattr(lookup, "find_spec", lambda _: torch or None)
    message = "other parts are frozen weights" if torch else "only the text part"
    with pytest.warns(SpecWarning, match=message):
        model = find_model(str(tmp_path))
    assert isinstance(model, ConfigRef if torch else ModelSpec)


def test_the_text_part_is_completed_as_transformers_does() -> None:
    """What the published file of Gemma 3 4B says of its text."""
    given = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
             "model_type": "gemma3_text", "sliding_window": 1024}  # fmt: skip
    model = from_config({"model_type": "gemma3", "text_config": given})
    sizes = (model.vocab, model.heads, model.kv_heads, model.head_dim, model.window)
    assert sizes == (262_208, 8, 4, 256, 1024)
    assert model.tied
