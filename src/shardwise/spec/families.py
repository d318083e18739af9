"""The structure of each family of models, as transformers builds it.

Only differences from the defaults of ModelSpec (a Llama) are listed. The tests build every family
with transformers on the meta device and compare parameters, FLOPs and saved bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FAMILIES: Mapping[str, Mapping[str, object]] = {
    "gpt2": {
        "norm": "layernorm",
        "norm_parameters": "weight+bias",
        "qkv": "fused",
        "mlp": "plain",
        "activation": "gelu_new",
        "positions": "learned",
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "transposed_weights": True,
        "tied": True,
    },
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head"},
    "gemma": {"norm": "rmsnorm_fp32", "activation": "gelu_tanh", "tied": True},
    "gemma2": {
        "norm": "rmsnorm_fp32",
        "activation": "gelu_tanh",
        "layout": "sandwich",
        "tied": True,
        "final_softcap": True,
        "global_every": 2,
    },
    "gemma3_text": {
        "norm": "rmsnorm_fp32",
        "activation": "gelu_tanh",
        "layout": "sandwich",
        "qk_norm": "head",
        "tied": True,
        "global_every": 6,
    },
    "mpt": {
        "norm": "layernorm",
        "norm_parameters": "weight",
        "qkv": "fused",
        "mlp": "plain",
        "activation": "gelu",
        "positions": "alibi",
        "tied": True,
    },
    "olmo": {"norm": "layernorm", "norm_parameters": "none"},
    "olmo2": {"norm": "rmsnorm_fp32", "layout": "post", "qk_norm": "width"},
    "phi": {
        "norm": "layernorm",
        "norm_parameters": "weight+bias",
        "layout": "parallel",
        "mlp": "plain",
        "activation": "gelu_new",
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    },
    "phi3": {"qkv": "fused", "mlp": "gated_fused"},
    "opt": {
        "norm": "layernorm",
        "norm_parameters": "weight+bias",
        "mlp": "plain",
        "activation": "relu",
        "positions": "learned",
        "position_offset": 2,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied": True,
    },
    "gpt_neox": {
        "norm": "layernorm",
        "norm_parameters": "weight+bias",
        "layout": "parallel_two_norms",
        "qkv": "fused",
        "mlp": "plain",
        "activation": "gelu",
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
}


# Families that support tensor parallelism: transformers has a plan for each, in styles that the
# engine supports.
DIVISIBLE = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "phi")
)


class Blocks(NamedTuple):
    """The repeated blocks of a family in transformers."""

    class_name: str
    # Path of the list of blocks in the model.
    path: str = "model.layers"


# For every family above; a test builds each.
BLOCKS: Mapping[str, Blocks] = {
    "gpt2": Blocks("GPT2Block", "transformer.h"),
    "llama": Blocks("LlamaDecoderLayer"),
    "mistral": Blocks("MistralDecoderLayer"),
    "mixtral": Blocks("MixtralDecoderLayer"),
    "qwen2": Blocks("Qwen2DecoderLayer"),
    "qwen3": Blocks("Qwen3DecoderLayer"),
    "qwen3_moe": Blocks("Qwen3MoeDecoderLayer"),
    "gemma": Blocks("GemmaDecoderLayer"),
    "gemma2": Blocks("Gemma2DecoderLayer"),
    "gemma3_text": Blocks("Gemma3DecoderLayer"),
    "mpt": Blocks("MptBlock", "transformer.blocks"),
    "olmo": Blocks("OlmoDecoderLayer"),
    "olmo2": Blocks("Olmo2DecoderLayer"),
    "phi": Blocks("PhiDecoderLayer"),
    "phi3": Blocks("Phi3DecoderLayer"),
    "opt": Blocks("OPTDecoderLayer", "model.decoder.layers"),
    "gpt_neox": Blocks("GPTNeoXLayer", "gpt_neox.layers"),
}


# Names of a block's linear layers in transformers, by the names used in the formulas.
_LINEARS: Mapping[str, str] = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.qkv": "self_attn.qkv_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.gate_up": "mlp.gate_up_proj",
}
_OTHER_LINEARS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "mpt": {
        "attention.qkv": "attn.Wqkv",
        "attention.out": "attn.out_proj",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
    "phi": {"attention.out": "self_attn.dense", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
    "opt": {"attention.out": "self_attn.out_proj", "mlp.up": "fc1", "mlp.down": "fc2"},
    "gpt_neox": {
        "attention.qkv": "attention.query_key_value",
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
}


def linear_names(family: str) -> Mapping[str, str]:
    """Names of a family's linear layers in transformers, by the names used in the formulas."""
    return {**_LINEARS, **_OTHER_LINEARS.get(family, {})}
