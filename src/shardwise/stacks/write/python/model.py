"""The model of a script: how it is built, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.families import BLOCKS
from shardwise.spec.huggingface import config_table, to_config
from shardwise.spec.lookup import ModuleRef, config_folder
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python.constants import Code
from shardwise.stacks.write.python.settings import train_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
# Defaults of transformers for these families.
ROPE_THETA, NORM_EPSILON, INITIAL_STD = 10000.0, 1e-6, 0.02


def config_of(model: ModelSpec) -> Mapping[str, object]:
    """The config.json that describes the model to transformers, as a dictionary."""
    if model.config is None:
        return to_config(model)
    return config_table(Path(model.config))


def can_be_written(run: RunSpec) -> bool:
    """Whether the program contains this model, in torch only."""
    model = run.model
    if not isinstance(model, ModelSpec) or model.family not in FAMILIES or model.pretrained:
        return False
    config = config_of(model)
    window = config.get("sliding_window") if model.family == "mistral" else None
    return (
        config.get("model_type") == model.family
        and config.get("hidden_act", "silu") in ACTIVATIONS
        # transformers repeats the keys of wider heads before it attends to them.
        and (model.kv_heads == model.heads or model.head_dim <= 256)
        and not _scales_rope(config)
        and not config.get("attention_dropout")
        and not config.get("use_sliding_window")
        and config.get("pad_token_id") is None
        and config.get("quantization_config") is None
        and (model.family == "llama" or config.get("num_key_value_heads") is not None)
        and (window is None or (isinstance(window, int) and window > run.job.seq_len))
    )


def _scales_rope(config: Mapping[str, object]) -> bool:
    """Whether the configuration scales rotary embeddings."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return True
    return given.get("rope_type", given.get("type", "default")) != "default"


def builder_of(run: RunSpec) -> str:
    """What builds the model: "written" (the script), "transformers" or "factory" (user code)."""
    if isinstance(run.model, ModuleRef):
        return "factory"
    return "written" if can_be_written(run) else "transformers"


def fills(run: RunSpec) -> bool:
    """Whether a model from transformers or user code is initialised by the script, unit by unit."""
    return train_of(run).meta_init and not getattr(run.model, "pretrained", False)


def model_constants(run: RunSpec) -> dict[str, object]:
    """The sizes of the model, or the configuration that transformers builds it from."""
    model = run.model
    if isinstance(model, ModuleRef):
        return {"VOCAB": None, "CONFIG": None}
    if not isinstance(model, ModelSpec):
        return {"VOCAB": None, "CONFIG": str(config_folder(model.config))}
    config = config_of(model)
    return {
        "VOCAB": model.vocab,
        "LAYERS": model.layers,
        "HIDDEN": model.hidden,
        "HEADS": model.heads,
        "KV_HEADS": model.kv_heads,
        "HEAD_DIM": model.head_dim,
        "FFN": model.ffn,
        "ROPE_THETA": model.rope_theta or ROPE_THETA,
        "NORM_EPSILON": config.get("rms_norm_eps") or NORM_EPSILON,
        "INITIAL_STD": config.get("initializer_range") or INITIAL_STD,
        "CONFIG": to_config(model) if model.config is None else str(config_folder(model.config)),
    }


def _activation(config: Mapping[str, object]) -> Code | None:
    """The activation function as code; None if the script does not have it."""
    name = ACTIVATIONS.get(str(config.get("hidden_act", "silu")))
    return None if name is None else Code(f"nn.functional.{name}")


def model_choices(run: RunSpec) -> dict[str, object]:
    """The parts that the model has, and the path of its blocks (None: found by a search)."""
    model = run.model
    if not isinstance(model, ModelSpec):
        absent = ("QKV_BIAS", "OUTPUT_BIAS", "MLP_BIAS", "QK_NORM", "GROUPED", "TIED")
        return {
            "BLOCKS": None,
            "ACTIVATION": None,
            "HAS_HEAD": True,
            **dict.fromkeys(absent, False),
        }
    config = config_of(model)
    return {
        "BLOCKS": BLOCKS[model.family].path,
        "ACTIVATION": _activation(config),
        "QKV_BIAS": bool(model.family == "qwen2" or config.get("attention_bias")),
        "OUTPUT_BIAS": bool(model.family != "qwen2" and config.get("attention_bias")),
        "MLP_BIAS": bool(model.family == "llama" and config.get("mlp_bias")),
        "QK_NORM": model.family == "qwen3",
        "GROUPED": model.kv_heads < model.heads,
        "TIED": model.tied,
        # A divided head is a module of its own, which a style can be applied to.
        "HAS_HEAD": not model.tied or run.strategy.tensor > 1,
    }
