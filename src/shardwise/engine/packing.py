"""Packed sequences: several examples in one, none of which attends to another.

The positions of each example start at 0. Where every layer attends to the whole sequence, the model
is given a mask too. It is a tensor of the model's dtype, which all layers share: a mask of
transformers is boolean, and attention converts and keeps it in every layer. Where layers have
sliding windows, a mask would replace them. There transformers reads the boundaries from the
positions, which it does without an attention mask and without a cache.

Not every architecture keeps examples apart: OPT ignores boundaries in positions without an error.
So only those are accepted that a test has compared with the examples alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.spec.record import SpecError

# By `model_type`, as in config.json.
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
    """The keywords of a forward call with packed examples; none without positions."""
    if positions is None:
        return {}
    settings = {"position_ids": positions, "use_cache": False}
    if _attends_to_all(getattr(model, "config", None), positions.shape[1]):
        settings["attention_mask"] = _mask(positions, next(model.parameters()).dtype)
    return settings


def _mask(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 from each token to itself and those before it in its example, otherwise -inf."""
    example = (positions == 0).cumsum(1)
    together = (example[:, :, None] == example[:, None, :]).tril()
    mask = torch.zeros(together.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~together, float("-inf"))[:, None]


def _attends_to_all(config: Any, seq_len: int) -> bool:
    """Whether no layer has a sliding window shorter than the sequence."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) == {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return window is None or window >= seq_len


def check_packing(model: nn.Module) -> None:
    """Raise SpecError unless the model is known to keep packed examples apart."""
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
