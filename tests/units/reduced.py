"""Reduced models of each family, as specs and as the transformers modules they describe."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.huggingface import to_config
from shardwise.spec.model import ModelSpec

_PLAIN = {"gpt2", "mpt", "opt", "phi", "gpt_neox"}
_GROUPED = {
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
}


def reduced(family: str, **changes: Any) -> ModelSpec:
    """A model of a few million parameters with every odd size the family allows."""
    fields: dict[str, Any] = {
        "family": family,
        "layers": 3,
        "hidden": 256,
        "heads": 4,
        "head_dim": 64,
        "kv_heads": 2 if family in _GROUPED else 1 if family == "gemma" else 4,
        "ffn": 1024 if family in _PLAIN else 704,
        "vocab": 1000,
        "max_positions": 512,
    }
    if family in ("mixtral", "qwen3_moe"):
        fields |= {"experts": 4, "experts_per_token": 2}
    if family in ("gemma2", "gemma3_text"):
        fields |= {"window": 32}
    return ModelSpec.read({**fields, **changes})


def build(spec: ModelSpec, *, device: str = "meta", attention: str | None = None) -> Any:
    """The module transformers builds from the spec's configuration, in training mode."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**to_config(spec))
    settings = {"attn_implementation": attention} if attention else {}
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(config, **settings)
    module.config.use_cache = False
    return module.train()
