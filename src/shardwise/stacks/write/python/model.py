"""Llama, Mistral, Qwen2 and Qwen3 in torch alone.

Operations and their order are those of transformers with fused attention, so that results are equal
bit by bit; modules are named as in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.huggingface import config_table, to_config
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python import axes
from shardwise.stacks.write.python.loss import chunks_loss
from shardwise.stacks.write.python.piece import Piece, lines

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
# Defaults of transformers in these families.
ROPE_THETA, NORM_EPSILON, INITIAL_STD = 10000.0, 1e-6, 0.02


def config_of(model: ModelSpec) -> Mapping[str, object]:
    """The config.json from which transformers builds the model."""
    if model.config is None:
        return to_config(model)
    return config_table(Path(model.config))


def can_be_written(run: RunSpec) -> bool:
    """Whether this module can write the model."""
    model = run.model
    if not isinstance(model, ModelSpec) or model.family not in FAMILIES or model.pretrained:
        return False
    config = config_of(model)
    window = config.get("sliding_window") if model.family == "mistral" else None
    return (
        config.get("model_type") == model.family
        and config.get("hidden_act", "silu") in ACTIVATIONS
        # transformers repeats the keys of wider heads before it attends to them.
        and (model.kv_heads == model.heads or model.head_dim <= 256)
        and not _scales_rope(config)
        and not config.get("attention_dropout")
        and not config.get("use_sliding_window")
        and config.get("pad_token_id") is None
        and config.get("quantization_config") is None
        and (model.family == "llama" or config.get("num_key_value_heads") is not None)
        and (window is None or (isinstance(window, int) and window > run.job.seq_len))
    )


def _scales_rope(config: Mapping[str, object]) -> bool:
    """Whether the configuration scales rotary embeddings."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return True
    return given.get("rope_type", given.get("type", "default")) != "default"


def model_settings(run: RunSpec) -> dict[str, object]:
    """The constants of a model that is written out."""
    model = run.model
    assert isinstance(model, ModelSpec)
    config = config_of(model)
    return {
        "VOCAB": model.vocab,
        "LAYERS": model.layers,
        "HIDDEN": model.hidden,
        "HEADS": model.heads,
        "KV_HEADS": model.kv_heads,
        "HEAD_DIM": model.head_dim,
        "FFN": model.ffn,
        "ROPE_THETA": model.rope_theta or ROPE_THETA,
        "NORM_EPSILON": config.get("rms_norm_eps") or NORM_EPSILON,
        "INITIAL_STD": config.get("initializer_range") or INITIAL_STD,
    }


def model_pieces(run: RunSpec) -> list[Piece]:
    model = run.model
    assert isinstance(model, ModelSpec)
    config = config_of(model)
    biased = {
        "qkv": bool(model.family == "qwen2" or config.get("attention_bias")),
        "output": bool(model.family != "qwen2" and config.get("attention_bias")),
        "mlp": bool(model.family == "llama" and config.get("mlp_bias")),
    }
    divided = axes.has_axes(run)
    attends = axes.calls_attend(run)
    attention = Piece(
        _attention(model, biased, attends),
        () if attends else ("torch.nn.functional:scaled_dot_product_attention",),
    )
    return [
        Piece(NORM, ("torch", "torch:nn")),
        Piece(ROTARY_OF_POSITIONS if divided else ROTARY),
        attention,
        _mlp(str(config.get("hidden_act", "silu")), biased["mlp"]),
        Piece(BLOCK),
        _transformer(run, model),
        _initialize(run, any(biased.values())),
    ]


NORM = """
class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x.float()
        high = high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + NORM_EPSILON)
        return self.weight * high.to(x.dtype)
"""

_TABLES = '''
def rotary_tables(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position's angles, both halves of a head alike."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float, device=x.device) / HEAD_DIM
    positions = torch.arange(x.shape[1], device=x.device)[:, None].float()
    angles = positions * (1.0 / ROPE_THETA**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
'''
_ROTATE = """

def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)
"""
ROTARY = _TABLES + _ROTATE
# A rank that divides sequences with others has some of their positions.
ROTARY_OF_POSITIONS = (
    _TABLES.replace("(x: torch.Tensor)", "(positions: torch.Tensor, dtype: torch.dtype)")
    .replace("    positions = torch.arange(x.shape[1], device=x.device)[:, None].float()\n", "")
    .replace("angles = positions * (", "angles = positions[:, None].float() * (")
    .replace("x.device", "positions.device")
    .replace("x.dtype", "dtype")
    + _ROTATE
)


def _attention(model: ModelSpec, biased: Mapping[str, bool], attends: bool) -> str:
    qk_norm = model.family == "qwen3"
    queries = "self.q_proj(x).view(heads)"
    keys = "self.k_proj(x).view(heads)"
    if qk_norm:
        queries, keys = f"self.q_norm({queries})", f"self.k_norm({keys})"
    grouped = ", enable_gqa=True" if model.kv_heads < model.heads else ""
    mixed = f"scaled_dot_product_attention(q, k, v, is_causal=True{grouped})"
    return lines(
        "class Attention(nn.Module):",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        f"        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias={biased['qkv']})",
        f"        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias={biased['qkv']})",
        f"        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias={biased['qkv']})",
        f"        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias={biased['output']})",
        qk_norm
        and "        self.q_norm = RMSNorm(HEAD_DIM)\n        self.k_norm = RMSNorm(HEAD_DIM)",
        f"""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:-1], -1, HEAD_DIM)
        q = {queries}.transpose(1, 2)
        k = {keys}.transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = {"attend(q, k, v)" if attends else mixed}
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
""",
    )


def _mlp(activation: str, bias: bool) -> Piece:
    function = ACTIVATIONS[activation]
    code = f"""
class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias={bias})
        self.up_proj = nn.Linear(HIDDEN, FFN, bias={bias})
        self.down_proj = nn.Linear(FFN, HIDDEN, bias={bias})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj({function}(self.gate_proj(x)) * self.up_proj(x))
"""
    return Piece(code, (f"torch.nn.functional:{function}",))


BLOCK = """
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.post_attention_layernorm = RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))
"""


def _transformer(run: RunSpec, model: ModelSpec) -> Piece:
    # A divided head is a module of its own, which a style can be applied to.
    tied = model.tied and run.strategy.tensor == 1
    weight = "self.model.embed_tokens.weight" if tied else "self.lm_head.weight"
    result = f"return linear(x, {weight})" if tied else "return self.lm_head(x)"
    divided = axes.has_axes(run)
    arguments = "self, ids: torch.Tensor"
    imports = ["torch.nn.functional:linear"] if tied else []
    if divided:
        arguments += ", positions: torch.Tensor"
    if chunks_loss(run):
        arguments += ", targets: torch.Tensor"
        result = lines(
            f"weight = {weight}",
            "        return ChunkedLoss.apply(partial(linear, weight=weight), x, targets, weight)",
        )
        imports = ["torch.nn.functional:linear", "functools:partial"]
    code = lines(
        _TRANSFORMER.replace("RESULT", _RESULTS[chunks_loss(run)]),
        not tied and "        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)",
        f"""

    def forward({arguments}) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = rotary_tables({"positions, x.dtype" if divided else "x"})
        for block in self.model.layers:
            x = block(x, cos, sin)
        x = self.model.norm(x)
        {result}
""",
    )
    return Piece(code, tuple(imports))


_RESULTS = {False: "Tokens to logits", True: "Tokens to their summed loss"}
_TRANSFORMER = '''
class Transformer(nn.Module):
    """RESULT. Parameters are named as in checkpoints of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCAB, HIDDEN),
                "layers": nn.ModuleList(Block() for _ in range(LAYERS)),
                "norm": RMSNorm(HIDDEN),
            }
        )
'''


def _initialize(run: RunSpec, biases: bool) -> Piece:
    sharded = run.strategy.sharded
    code = lines(
        "def initialize(modules: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:"
        if sharded
        else "def initialize(model: nn.Module) -> None:",
        '''
    """Allocate and initialise the layers that are still on the meta device.

    Each layer has a seed from its name, so every rank draws the same numbers, and none ever holds
    more than one unsharded unit.
    """
    for name, layer in modules:
        if not any(parameter.is_meta for parameter in layer.parameters(recurse=False)):
            continue
        layer.to_empty(device=device, recurse=False)
'''
        if sharded
        else '''
    """Initialise each layer from its own seed, so that every rank draws the same numbers."""
    for name, layer in model.named_modules():
''',
        """
        seed = sha256(f"{SEED}/{name}".encode()).digest()
        torch.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
        if isinstance(layer, RMSNorm):
            nn.init.ones_(layer.weight)
""",
        """
        elif isinstance(layer, (nn.Linear, nn.Embedding)):
            nn.init.normal_(layer.weight, std=INITIAL_STD)
""",
        biases
        and """
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)
""",
    )
    return Piece(code, ("hashlib:sha256", *(("collections.abc:Iterable",) if sharded else ())))
