"""Inputs that a model of transformers takes, as shapes: token ids, images or sound."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.spec.record import SpecError


def example_inputs(
    module: nn.Module, batch: int, seq_len: int, dtype: torch.dtype
) -> Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    """A batch as `module` takes it, with labels if it takes them; all zeros.

    Token ids have `seq_len` per sample. Images and spectrograms have the model's own size and
    `dtype`. A module that names no `input_ids` gets token ids as its only argument.
    """
    ids = torch.zeros((batch, seq_len), dtype=torch.long, device="cpu")
    takes = inspect.signature(module.forward).parameters
    config: Any = getattr(module, "config", None)
    main = getattr(module, "main_input_name", "input_ids")
    if main == "pixel_values" and "pixel_values" in takes and "input_ids" not in takes:
        size = _pair(config.image_size)
        images = torch.zeros((batch, config.num_channels, *size), dtype=dtype, device="cpu")
        return {"pixel_values": images, **({"labels": ids[:, 0]} if "labels" in takes else {})}
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        # The encoder halves the number of frames once.
        shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)
        sound = torch.zeros(shape, dtype=dtype, device="cpu")
        return {"input_features": sound, "labels": ids}
    if "input_ids" not in takes:
        return (ids,)
    named = {"input_ids": ids}
    if "labels" in takes:
        named["labels"] = ids.clone()
    if "token_type_ids" in takes and "text_config" in getattr(config, "sub_configs", {}):
        # In training these models ask which tokens are text; their type is 0.
        named["token_type_ids"] = ids.clone()
    return named


def check_seq_len(module: nn.Module, seq_len: int) -> None:
    """Raise SpecError for a sequence that a model of transformers has no positions for."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    if getattr(module, "main_input_name", "") == "pixel_values" and hasattr(config, "patch_size"):
        patches = [side // patch for side, patch in zip(
            _pair(config.image_size), _pair(config.patch_size), strict=True
        )]  # fmt: skip
        fixed = patches[0] * patches[1] + 1
        if seq_len != fixed:
            raise SpecError(
                f"job.seq_len: an image of {type(module).__name__} is {fixed} tokens; set seq_len "
                f"to {fixed} or leave it out"
            )
        return
    if config.get_text_config() is not config:
        return
    for name, part in module.named_modules():
        learned = isinstance(part, nn.Embedding) and "position" in name.rpartition(".")[2]
        if learned and ".encoder." not in name and part.num_embeddings < seq_len:
            raise SpecError(
                f"job.seq_len: {seq_len} exceeds the {part.num_embeddings} learned positions of "
                f"{type(module).__name__}; shorten the sequence"
            )


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, of which a configuration gives both or one for both."""
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) else (size, size)
