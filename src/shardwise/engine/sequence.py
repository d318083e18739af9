"""Positions and masks of full sequences, for activations that are sharded along the sequence.

Models of transformers derive both from the length of their embedded input. If that is sharded,
they must be passed to the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.spec.record import SpecError


def use_full_sequences(model: nn.Module, parts: int, dtype: torch.dtype) -> None:
    """Make every forward of a transformers model get positions and masks of the full sequence.

    `parts` is the number of processes that share a sequence, `dtype` that of activations. Models
    without a config are left alone.
    """
    config = getattr(model, "config", None)
    if config is None:
        return

    def add(_: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        ids = settings["input_ids"] if "input_ids" in settings else args[0]
        if ids.shape[1] % parts:
            raise SpecError(
                f"strategy.tensor: {parts} does not divide the sequence length {ids.shape[1]}; "
                "choose one that it divides, or set sequence_parallel = false"
            )
        settings = dict(settings)
        if settings.get("position_ids") is None:
            settings["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
        settings["attention_mask"] = full_sequence_masks(
            config, ids, settings["position_ids"], settings.get("attention_mask"), dtype
        )
        return args, settings

    model.register_forward_pre_hook(add, with_kwargs=True)


def full_sequence_masks(
    config: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    mask: Any,
    dtype: torch.dtype,
) -> Any:
    """The mask, or masks by kind of layer, that the model would create for full sequences.

    A `mask` that is a dictionary already is returned unchanged.
    """
    if isinstance(mask, dict):
        return mask
    from transformers.masking_utils import create_masks_for_generate

    return create_masks_for_generate(
        config=config,
        # Only its shape, dtype and device are read.
        inputs_embeds=torch.empty(*ids.shape, 0, dtype=dtype, device=ids.device),
        attention_mask=mask,
        past_key_values=None,
        position_ids=positions,
    )
