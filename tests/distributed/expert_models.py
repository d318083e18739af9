"""Tiny mixtures of experts of five families of transformers, with every form that experts take."""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import nn

Routing = Literal["drawn", "skewed", "starved"]
EXPERTS, WIDTH, VOCAB = 8, 32, 61
# The first block of DeepSeek-V3 has no experts; gpt-oss has biases and transposed weights.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": EXPERTS, "norm_topk_prob": False},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "num_hidden_layers": 3,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "sliding_window": 8},
}  # fmt: skip


class _Fp64:
    """The module torch, in which fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def build(family: str, device: str = "meta", **settings: Any) -> Any:
    """The module, all of it in fp64 once its parameters are.

    Experts are computed one by one, since grouped products have no fp64. Norms and routers, which
    models compute in fp32 in every dtype, are computed in fp64 too: sums of several processes
    differ in their last digits.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
        "initializer_range": 0.2, "use_cache": False, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **fields | FAMILIES[family] | settings)
    code = sys.modules[transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    code.torch = _Fp64()  # type: ignore[attr-defined]
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(config)
    module.set_experts_implementation("eager")
    return module.train()


def router_of(name: str) -> bool:
    """Whether a parameter is the matrix of a router."""
    return name.endswith((".gate.weight", ".router.weight"))


def initialise(module: nn.Module, routing: Routing) -> Any:
    """A function that initialises a module of `module`, so that tokens are routed as asked.

    The first number of every hidden state is about 4, so a router can prefer experts. Skewed, the
    first expert is among those of every token; starved, all tokens go to the first two.
    """
    own = module._init_weights

    def fill(name: str, part: nn.Module) -> None:
        own(part)  # type: ignore[operator]
        if routing == "drawn":
            return
        preferred = 1 if routing == "skewed" else 2
        if name.endswith("embed_tokens"):
            part.weight.data[:, 0] = 4.0  # type: ignore[union-attr, operator]
        if name.endswith(("o_proj", "mlp.down_proj")):
            part.weight.data[0] = 0.0  # type: ignore[union-attr, operator]
        if router_of(f"{name}.weight"):
            part.weight.data[:, 0] = 0.0  # type: ignore[union-attr, operator]
            part.weight.data[:preferred, 0] = 20.0  # type: ignore[union-attr, operator]

    return fill
