"""Eager attention: what autograd saves in a real model, against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from shardwise.spec.model import ModelSpec  # noqa: E402
from shardwise.units.decoder import decoder_units  # noqa: E402

SEQ_LEN = 128


def saved_by_blocks(model: Any, implementation: str) -> int:
    """Bytes of distinct storages that autograd saves, without parameters."""
    model.set_attn_implementation(implementation)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(SEQ_LEN).view(1, -1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.model(ids).last_hidden_state
    assert output.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_saved_scores(kv_heads: int) -> None:
    spec = ModelSpec(
        name="small", family="llama", layers=3, hidden=64, heads=4, kv_heads=kv_heads, ffn=96,
        head_dim=16, vocab=256, max_positions=SEQ_LEN,
    )  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
        num_key_value_heads=kv_heads, vocab_size=256, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    real = saved_by_blocks(model, "eager") - saved_by_blocks(model, "sdpa")

    def kept(eager: bool) -> float:
        units = decoder_units(spec, SEQ_LEN, eager=eager)
        return sum(block.stage.kept["none"].activation_bytes for block in units.blocks) * SEQ_LEN

    assert real == pytest.approx(kept(True) - kept(False), rel=0.03)
