"""Packed sequences: several examples in one, none of which attends to another.

The positions of each example start at 0. If every layer attends to the full sequence, the model
also gets a mask. It is a tensor of the model's dtype, which all layers share: a mask of
transformers is boolean, and attention converts and keeps it in every layer. If layers have sliding
windows, a mask would replace them. Then transformers reads the boundaries from the positions, which
it does without an attention mask and without a cache.

Not every architecture keeps examples apart: OPT ignores boundaries in positions without an error.
So only architectures are accepted for which a test has compared packed with separate examples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.spec.record import SpecError

# Accepted architectures, by `model_type` of config.json.
ARCHITECTURES = (
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
# Flash attention of transformers sees boundaries only in a batch of one sequence. Context
# parallelism registers attention functions whose names begin with sdpa.
_ATTENTION = ("sdpa", "eager")


def packed_settings(model: nn.Module, positions: torch.Tensor | None) -> dict[str, Any]:
    """Keywords of a forward call for packed examples; empty if `positions` is None."""
    if positions is None:
        return {}
    settings = {"position_ids": positions, "use_cache": False}
    if _attends_to_all(getattr(model, "config", None), positions.shape[1]):
        settings["attention_mask"] = _mask(positions, next(model.parameters()).dtype)
    return settings


def _mask(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask, (batch, 1, sequence, sequence), for causal attention within examples.

    It is 0 from each token to itself and to earlier ones of its example, otherwise -inf.
    """
    example = (positions == 0).cumsum(1)
    together = (example[:, :, None] == example[:, None, :]).tril()
    mask = torch.zeros(together.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~together, float("-inf"))[:, None]


def _attends_to_all(config: Any, seq_len: int) -> bool:
    """Whether every layer attends to full sequences of `seq_len` tokens."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) == {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return window is None or window >= seq_len


def check_packing(model: nn.Module) -> None:
    """Raise SpecError unless a test has shown that the model keeps packed examples apart."""
    config = getattr(model, "config", None)
    architecture = getattr(config, "model_type", None) or type(model).__name__
    if architecture not in ARCHITECTURES:
        raise SpecError(
            f"data.packing: {architecture} is not known to keep packed examples apart; set "
            "packing = false"
        )
    attention = getattr(config, "_attn_implementation", None)
    if not str(attention).startswith(_ATTENTION):
        raise SpecError(
            f"data.packing: needs attn_implementation sdpa or eager; the model has {attention}"
        )
