"""Attention of transformers models as one kernel, as GPUs run it, while a module is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardwise.pytorch.private import EFFICIENT_ATTENTION, has_flex_attention
from shardwise.units.recorder import Recorder

_NAME = "shardwise_fused"
# A context in which the attention of a module is recorded in one way.
Attention = Callable[[nn.Module, Recorder], AbstractContextManager[None]]


def own_attention(_: nn.Module, __: Recorder) -> AbstractContextManager[None]:
    """A context in which a module attends as it does by itself, with a mask if it makes one."""
    return nullcontext()


def has_fused_attention(module: nn.Module) -> bool:
    """Whether `fused_attention` changes anything in a module."""
    return bool(_configs(module))


@contextmanager
def fused_attention(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """While entered, attention runs as one kernel, without a mask and without dropout.

    With real tensors transformers sees that a mask is causal and drops it. With fake tensors it
    cannot, and the trace would show a slower attention than the one that runs. Fused kernels of
    GPUs draw dropout inside, while what the trace can call would write every score. Sinks and
    sliding windows, too, are arguments of such kernels; the recorder is told the window.
    """
    configs = _configs(module)
    if not configs:
        yield
        return
    from transformers import AttentionInterface

    def attend(
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: Any,
    ) -> Any:
        recorder.window = settings.get("sliding_window")
        # What is added to scores and trained, such as relative positions, is no mask.
        trained = attention_mask is not None and attention_mask.requires_grad
        settings["dropout"] = 0.0
        # FlashAttention and flex attention cap scores inside; the call below does not know it.
        settings.pop("softcap", None)
        try:
            if value.shape[-1] != key.shape[-1]:
                return _of_unequal_heads(query, key, value, settings.get("scaling")), None
            return _sdpa(layer, query, key, value, attention_mask if trained else None, **settings)
        finally:
            recorder.window = None

    AttentionInterface.register(_NAME, attend)
    before = [(config, config._attn_implementation) for config in configs]
    caching = [(config, getattr(config, "use_cache", None)) for config in configs]
    for config in configs:
        config._attn_implementation = _NAME
        config.use_cache = False
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
        for config, cache in caching:
            config.use_cache = cache


def _sdpa(*args: Any, **settings: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **settings)


def _of_unequal_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention whose values are narrower than its keys, by the kernel that supports this.

    The CPU has none, so scaled_dot_product_attention would write every score.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = EFFICIENT_ATTENTION(query, key, value, None, True, 0.0, True, scale=scale)[0]
    heads_last: torch.Tensor = out.transpose(1, 2).contiguous()
    return heads_last


def _configs(module: nn.Module) -> list[Any]:
    """The configurations of all parts of a model whose attention can be a fused kernel."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        fused = kind == "sdpa" or (kind == "eager" and has_flex_attention(part))
        if config is not None and fused:
            configs[id(config)] = config
    return list(configs.values())
