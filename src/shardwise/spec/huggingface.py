"""Convert a Hugging Face `config.json` to a ModelSpec and back, without importing transformers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.families import FAMILIES
from shardwise.spec.hub import LARGEST_CONFIG_BYTES, folder_name
from shardwise.spec.model import ModelSpec
from shardwise.spec.read_file import read_json
from shardwise.spec.record import SpecError, SpecWarning, did_you_mean

_USUAL_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
_KEYS_OF: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "ffn": "n_inner",
        "vocab": "vocab_size",
        "max_positions": "n_positions",
        "tied": "tie_word_embeddings",
    },
    "mpt": {
        "layers": "n_layers",
        "hidden": "d_model",
        "heads": "n_heads",
        "vocab": "vocab_size",
        "max_positions": "max_seq_len",
        "tied": "tie_word_embeddings",
    },
    "opt": {
        **{k: v for k, v in _USUAL_KEYS.items() if k not in ("kv_heads", "head_dim")},
        "ffn": "ffn_dim",
    },
    "gpt_neox": {k: v for k, v in _USUAL_KEYS.items() if k not in ("kv_heads", "head_dim")},
    "olmo": {k: v for k, v in _USUAL_KEYS.items() if k != "head_dim"},
    "olmo2": {k: v for k, v in _USUAL_KEYS.items() if k != "head_dim"},
    "phi": {k: v for k, v in _USUAL_KEYS.items() if k != "head_dim"},
    "phi3": {k: v for k, v in _USUAL_KEYS.items() if k != "head_dim"},
    "qwen2": {k: v for k, v in _USUAL_KEYS.items() if k != "head_dim"},
    "mixtral": {
        **_USUAL_KEYS,
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    "qwen3_moe": {
        **_USUAL_KEYS,
        "ffn": "moe_intermediate_size",
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
    },
}
# Values of transformers for what published files leave out of the text part of a larger model.
_TEXT_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gemma3_text": {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }
}
# Keys that a configuration may leave out because a default follows from the others.
_OPTIONAL = {"kv_heads", "head_dim", "max_positions", "tied"}
# Families with a sliding window: in all blocks (_WINDOWED), or in all but every n-th.
_WINDOWED = {"mistral", "phi3"}
_ALTERNATING = {"gemma2", "gemma3_text"}
_BIASES_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "llama": {"attention_bias": ("attention_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
    "qwen3": {"attention_bias": ("attention_bias", "output_bias")},
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_THETA_OF = {"gpt_neox": "rotary_emb_base"}
# The only supported value of settings that the formulas do not describe; others are refused.
_UNSUPPORTED_VALUES = {
    ("opt", "do_layer_norm_before"): True,
    ("gpt_neox", "use_parallel_residual"): True,
    ("qwen3_moe", "mlp_only_layers"): [],
    ("qwen3_moe", "decoder_sparse_step"): 1,
}


class UnknownFamilyError(SpecError):
    """A configuration of a model type that has no formulas."""


def read_config(path: Path) -> ModelSpec:
    """The model described by a `config.json` or by the folder that holds one."""
    table = config_table(path)
    model = from_config(table, name=config_name(path))
    warn_of_unused(table)
    return model


def config_name(path: Path) -> str:
    """The name of a model: its folder's, or that of a file that is not called config.json."""
    file = _config_file(path)
    return folder_name(file.parent.resolve()) if file.name == "config.json" else file.stem


def is_multimodal(config: Mapping[str, object]) -> bool:
    """Whether a configuration has a part for text beside parts for images or sound."""
    return isinstance(config.get("text_config"), dict)


def longest_sequence(config: Mapping[str, object]) -> int | None:
    """Most tokens of a sequence as the configuration says; None if it does not.

    An image is a sequence of its patches and one token for its class.
    """
    text = config.get("text_config")
    table = text if isinstance(text, dict) else config
    for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
        longest = table.get(key)
        if isinstance(longest, int):
            return longest
    image, patch = table.get("image_size"), table.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and patch > 0:
        return (image // patch) ** 2 + 1
    return None


def warn_of_unused(config: Mapping[str, object], text_only: bool = True) -> None:
    """Warn of parts of a configuration that predictions ignore.

    With `text_only`, the other parts of a multimodal model are not even counted.
    """
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = str(quantized.get("quant_method", "unknown"))[:40]
        warnings.warn(
            f"model: quantization_config ({method}) is ignored: parameters are planned in the "
            "dtypes of the strategy, not quantized",
            SpecWarning,
            stacklevel=2,
        )
    if is_multimodal(config):
        kind = str(config.get("model_type"))[:40]
        told = (
            f"of the {kind} model only the text part (text_config) is planned"
            if text_only
            else f"the {kind} model is planned with text alone; its other parts are frozen weights"
        )
        warnings.warn(f"model: {told}", SpecWarning, stacklevel=2)


def trains_text(config: Mapping[str, object]) -> bool | None:
    """Whether a configuration names a model of text to come; None without `architectures`."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    causal = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return causal or (is_multimodal(config) and "is_encoder_decoder" not in config)


def without_formulas(config: Mapping[str, object]) -> str:
    """The error message for a model type without formulas where torch is not installed."""
    kind = str(config.get("model_type"))[:60]
    return (
        f"model: there are no formulas for model type '{kind}'; torch and transformers can trace "
        'it instead: pip install "shardwise[hf]"'
    )


def config_table(path: Path) -> dict[str, object]:
    """All keys of a `config.json`, unchanged; `path` is the file or its folder."""
    file = _config_file(path)
    # Read as transformers does, which writes infinities.
    config = read_json(file, "model", LARGEST_CONFIG_BYTES, twice=True, nan=True)
    if not isinstance(config, dict):
        raise SpecError(f"model: {file} holds no JSON object")
    return config


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def from_config(config: Mapping[str, object], name: str = "custom") -> ModelSpec:
    """A ModelSpec from the keys of a Hugging Face configuration.

    Raises UnknownFamilyError for a model type without formulas, and SpecError for missing keys or
    settings that the formulas do not describe.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        kind = text.get("model_type", config.get("model_type"))
        config = {**_TEXT_DEFAULTS.get(str(kind), {}), **text, "model_type": kind}
    if config.get("model_type") is None:
        raise SpecError("model: model_type is missing from the configuration")
    family = str(config["model_type"])
    if family not in FAMILIES:
        raise UnknownFamilyError(
            f"model: there are no formulas for model type '{family}'"
            f"{did_you_mean(family, FAMILIES)}; known types are {', '.join(sorted(FAMILIES))}"
        )
    fields: dict[str, object] = {"name": name, "family": family}
    problems = _unmodelled_settings(config, family)
    for field, key in _KEYS_OF.get(family, _USUAL_KEYS).items():
        if config.get(key) is not None:
            fields[field] = config[key]
        elif field not in _OPTIONAL and (family, field) != ("gpt2", "ffn"):
            problems.append(f"model: {key} is missing from the configuration")
    hidden = fields.get("hidden")
    if family in ("gpt2", "mpt") and isinstance(hidden, int):
        fields.setdefault("ffn", 4 * hidden)
    for key, biases in _BIASES_OF.get(family, {}).items():
        fields |= {bias: bool(config.get(key, False)) for bias in biases}
    fields |= _activation(config)
    if FAMILIES[family].get("positions", "rope") == "rope":
        fields |= _rope_theta(config, family)
    if family in _WINDOWED | _ALTERNATING and config.get("sliding_window"):
        fields["window"] = config["sliding_window"]
        if family in _ALTERNATING:
            fields |= _global_every(config)
    if problems:
        raise SpecError(problems)
    return ModelSpec.read(fields, where="model")


def _unmodelled_settings(config: Mapping[str, object], family: str) -> list[str]:
    """A sentence for each setting the formulas do not describe."""
    problems = [
        f"model: {key}={config[key]} is not modelled for '{family}'"
        for (owner, key), supported in _UNSUPPORTED_VALUES.items()
        if owner == family and config.get(key, supported) != supported
    ]
    width = config.get("hidden_size")
    if family == "opt" and config.get("word_embed_proj_dim", width) != width:
        problems.append("model: word_embed_proj_dim other than hidden_size is not modelled")
    return problems


def _activation(config: Mapping[str, object]) -> dict[str, object]:
    """The ModelSpec field of the activation function; empty if the configuration names none."""
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        given = config.get(key)
        if given is not None:
            known = _ACTIVATIONS.get(str(given))
            if known is None:
                raise SpecError(f"model: {key} '{given}' is not modelled")
            # Gemma 1 files name 'gelu', but the code runs the tanh form, which saves the same.
            return {"activation": known}
    return {}


def _rope_theta(config: Mapping[str, object], family: str) -> dict[str, object]:
    """The ModelSpec field of the rotary base; empty if the configuration has none."""
    # transformers looks here first.
    nested = config.get("rope_scaling") or config.get("rope_parameters")
    given = nested.get("rope_theta") if isinstance(nested, dict) else None
    theta = given or config.get(_THETA_OF.get(family, "rope_theta"))
    return {"rope_theta": theta} if theta is not None else {}


def _global_every(config: Mapping[str, object]) -> dict[str, object]:
    """The ModelSpec field of how often a block attends globally; empty if not given."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if isinstance(pattern, int):
        return {"global_every": pattern}
    types = config.get("layer_types")
    if isinstance(types, list) and "full_attention" in types:
        return {"global_every": types.index("full_attention") + 1}
    return {}


def to_config(model: ModelSpec) -> dict[str, object]:
    """The keys a transformers configuration class needs to build the same model."""
    keys = _KEYS_OF.get(model.family, _USUAL_KEYS)
    config: dict[str, object] = {"model_type": model.family}
    # A family's special token ids may be outside this model's vocabulary.
    config |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config |= {key: getattr(model, field) for field, key in keys.items()}
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    if model.family == "gpt2":
        config["activation_function"] = names[model.activation]
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    elif model.family == "opt":
        config["activation_function"] = names[model.activation]
        config |= {"word_embed_proj_dim": model.hidden, "dropout": model.dropout}
    elif model.family in _ALTERNATING | {"gemma"}:
        config["hidden_activation"] = names[model.activation]
    elif model.family != "mpt":
        config["hidden_act"] = names[model.activation]
    for key, biases in _BIASES_OF.get(model.family, {}).items():
        config[key] = getattr(model, biases[0])
    if model.rope_theta is not None:
        config[_THETA_OF.get(model.family, "rope_theta")] = model.rope_theta
    if model.family in _WINDOWED | _ALTERNATING:
        config["sliding_window"] = model.window
    if model.family in _ALTERNATING:
        config["layer_types"] = [
            "full_attention" if model.attends_globally(layer) else "sliding_attention"
            for layer in range(model.layers)
        ]
    return config
