"""The structure of each family of models, as transformers builds it.

Only what differs from the defaults of ModelSpec (a Llama) is listed. The tests build every family
with transformers on the meta device and hold parameters, FLOPs and saved bytes against these.
"""

from __future__ import annotations

from collections.abc import Mapping

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
