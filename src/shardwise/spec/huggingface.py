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
_REFUSED = {
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
    model = from_config(table, name=folder_name(_config_file(path).parent.resolve()))
    warn_of_unused(table)
    return model


def warn_of_unused(config: Mapping[str, object]) -> None:
    """Warn of parts of a configuration that predictions ignore."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = str(quantized.get("quant_method", "unknown"))[:40]
        warnings.warn(
            f"model: quantization_config ({method}) is ignored: parameters are planned in the "
            "dtypes of the strategy, not quantized",
            SpecWarning,
            stacklevel=2,
        )
    if isinstance(config.get("text_config"), dict):
        kind = str(config.get("model_type"))[:40]
        warnings.warn(
            f"model: of the {kind} model only the text part (text_config) is planned",
            SpecWarning,
            stacklevel=2,
        )


def trains_text(config: Mapping[str, object]) -> bool | None:
    """Whether a configuration names a causal language model; None without `architectures`."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    return any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def without_formulas(config: Mapping[str, object], torch: bool) -> str:
    """The error message for a model type without formulas; empty if the model can be traced.

    `torch` tells whether torch is installed.
    """
    kind = str(config.get("model_type"))[:60]
    start = f"model: there are no formulas for model type '{kind}'"
    factory = "--model package.module:factory, a function that returns the nn.Module"
    if trains_text(config) is False:
        return (
            f"{start}, and it is not a causal language model "
            f"({', '.join(map(str, config['architectures']))[:80]}), so transformers cannot build "  # type: ignore[call-overload]
            f"it for tracing; give {factory}"
        )
    if torch:
        return ""
    sure = "can" if trains_text(config) else "may be able to"
    return f'{start}; torch and transformers {sure} trace it instead: pip install "shardwise[hf]"'


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
        config = {**text, "model_type": text.get("model_type", config.get("model_type"))}
    if config.get("model_type") is None:
        raise SpecError("model: model_type is missing from the configuration")
    family = str(config["model_type"])
    if family not in FAMILIES:
        raise UnknownFamilyError(
            f"model: there are no formulas for model type '{family}'"
            f"{did_you_mean(family, FAMILIES)}; known types are {', '.join(sorted(FAMILIES))}"
        )
    fields: dict[str, object] = {"name": name, "family": family}
    problems = _unmodelled(config, family)
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


def _unmodelled(config: Mapping[str, object], family: str) -> list[str]:
    """A sentence for each setting the formulas do not describe."""
    problems = [
        f"model: {key}={config[key]} is not modelled for '{family}'"
        for (owner, key), supported in _REFUSED.items()
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
