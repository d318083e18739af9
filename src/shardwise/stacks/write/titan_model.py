"""A model in the terms of torchtitan: one of its flavors, or a Llama of other sizes."""

from __future__ import annotations

from shardwise.spec.lookup import Model
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError

# The release of torchtitan that the exported classes are from.
VERSION = "0.3.0"

# Keys: layers, hidden size, heads, key and value heads, MLP width, vocabulary.
_FLAVORS: dict[str, dict[tuple[int, ...], str]] = {
    "llama3": {
        (16, 2048, 32, 8, 8192, 128256): "1B",
        (28, 3072, 24, 8, 8192, 128256): "3B",
        (32, 4096, 32, 8, 14336, 128256): "8B",
        (80, 8192, 64, 8, 28672, 128256): "70B",
        (126, 16384, 128, 8, 53248, 128256): "405B",
    },
    "qwen3": {
        (28, 1024, 16, 8, 3072, 151936): "0.6B",
        (28, 2048, 16, 8, 6144, 151936): "1.7B",
        (36, 2560, 32, 8, 9728, 151936): "4B",
        (36, 4096, 32, 8, 12288, 151936): "8B",
        (40, 5120, 40, 8, 17408, 151936): "14B",
        (64, 5120, 64, 8, 25600, 151936): "32B",
        (48, 2048, 32, 4, 768, 151936): "30B-A3B",
        (94, 4096, 64, 4, 1536, 151936): "235B-A22B",
    },
}
_THETAS = {"llama3": 500_000, "qwen3": 1_000_000}
_TIED = ("1B", "3B", "0.6B", "1.7B", "4B")
_STRUCTURE = (
    *("norm", "norm_parameters", "layout", "qkv", "qk_norm", "mlp", "activation", "positions"),
    *("attention_bias", "output_bias", "mlp_bias", "head_bias", "window", "experts"),
    *("final_softcap", "dropout"),
)


def write_model(model: Model, backend: str = "") -> tuple[str, str]:
    """The code of the function that returns the model, and the code of its imports.

    `backend` is torchtitan's name of how tokens travel to experts; empty for its default.

    Raises:
        SpecError: torchtitan does not have this model.
    """
    if not isinstance(model, ModelSpec):
        raise SpecError("model: torchtitan trains its own models; name a Llama or a Qwen3 instead")
    library = "qwen3" if model.family in ("qwen3", "qwen3_moe") else "llama3"
    flavor = _flavor(model, library)
    if flavor is not None:
        sent = f', moe_comm_backend="{backend}"' if backend else ""
        body = f'def model_spec():\n    return model_registry("{flavor}"{sent})\n'
        return body, f"from torchtitan.models.{library} import model_registry"
    if not _is_plain(model, "llama") or model.head_dim * model.heads != model.hidden:
        raise SpecError(
            f"model: torchtitan {VERSION} has no {model.family} of these sizes; it has Llamas of "
            "any size and Qwen3 as published. Export it to python instead"
        )
    tables = "_EMBEDDING_SKIP_INIT" if model.tied else "_EMBEDDING_INIT"
    values = {**model.model_dump(), "tables": tables, "theta": model.rope_theta or 10_000.0}
    return _CUSTOM.format(**values), _CUSTOM_IMPORTS.format(tables=tables)


def scales_positions(model: Model) -> bool:
    """Whether the model is exported as a Llama flavor, which scales positions as Llama 3.1 does."""
    return isinstance(model, ModelSpec) and _flavor(model, "llama3") is not None


def _flavor(model: ModelSpec, library: str) -> str | None:
    """The name of torchtitan's flavor that equals this model; None if there is none."""
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab)
    flavor = _FLAVORS[library].get(sizes)
    family = model.family if library == "qwen3" else "llama"
    same = (
        flavor is not None
        and model.tied == (flavor in _TIED)
        and model.rope_theta == _THETAS[library]
        and _is_plain(model, family)
    )
    return flavor if same else None


_CUSTOM_IMPORTS = """\
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import (
    {tables},
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
    model_registry,
)"""
_CUSTOM = '''\
def model_spec():
    """A Llama of sizes that torchtitan has no flavor for."""
    spec = model_registry("debugmodel")
    spec.flavor = "custom"
    spec.model = Llama3Model.Config(
        dim={hidden},
        vocab_size={vocab},
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(
            num_embeddings={vocab}, embedding_dim={hidden}, param_init={tables}
        ),
        norm=RMSNorm.Config(normalized_shape={hidden}, param_init=_NORM_INIT),
        lm_head=Linear.Config(
            in_features={hidden}, out_features={vocab}, param_init=_output_linear_init({hidden})
        ),
        layers=_build_llama3_layers(
            n_layers={layers},
            dim={hidden},
            n_heads={heads},
            n_kv_heads={kv_heads},
            hidden_dim={ffn},
            rope=ComplexRoPE.Config(dim={head_dim}, max_seq_len={max_positions}, theta={theta}),
            attn_backend="flex",
        ),
    )
    return spec
'''


def _is_plain(model: ModelSpec, family: str) -> bool:
    """Whether the model has the structure of a family, with any sizes."""
    sizes = {"layers": 1, "hidden": 1, "heads": 1, "ffn": 1, "vocab": 1}
    mixture = {"experts": model.experts, "experts_per_token": model.experts_per_token}
    plain = ModelSpec.read(
        {"family": family, **sizes, **(mixture if family == "qwen3_moe" else {})}
    )
    return all(getattr(model, field) == getattr(plain, field) for field in _STRUCTURE)
