"""The code of a script that divides matrices and sequences: tensor and context parallelism.

Matrices are divided by the styles of torch.distributed.tensor.parallel, sequences by Ulysses.
"""

from __future__ import annotations

import math

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.write.python.piece import Piece, lines

# The names under which its styles and placements are imported.
_STYLES = tuple(
    f"torch.distributed.tensor.parallel:{name}"
    for name in ("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "parallelize_module")
)
_SEQUENCE = "torch.distributed.tensor.parallel:SequenceParallel"
_REPLICATE, _SHARD = "torch.distributed.tensor:Replicate", "torch.distributed.tensor:Shard"


def has_axes(run: RunSpec) -> bool:
    """Whether several devices work on the same sequences."""
    return run.strategy.mesh.inner > 1


def axes_pieces(run: RunSpec, written: bool) -> list[Piece]:
    """Code that defines `divide_block`, `divide_ends` and `attend`, as far as they are needed.

    `written`: the model is defined in the script, which then calls `attend` itself.
    """
    if not has_axes(run):
        return []
    pieces = []
    if run.strategy.context > 1:
        used = ("torch", "torch.distributed as dist", "typing:Any")
        pieces.append(Piece(_EXCHANGE, used))
    if run.strategy.context > 1 or not written:
        pieces.append(_attend(run, written))
    if run.strategy.tensor > 1:
        pieces += [_divide_block(run, written), _divide_ends(run)]
    return pieces


def calls_attend(run: RunSpec) -> bool:
    """Whether the attention of a model that the script defines exchanges tokens for heads."""
    return run.strategy.context > 1


# Ranks of one sequence: each has all heads of some tokens, or some heads of all tokens.
_EXCHANGE = '''
class Exchange(torch.autograd.Function):
    """Send a part of dimension `split` to every rank of a sequence; join theirs along `join`."""

    group: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: int, join: int) -> torch.Tensor:
        ctx.dimensions = split, join
        parts = torch.stack(x.chunk(CONTEXT, dim=split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=Exchange.group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        split, join = ctx.dimensions
        return Exchange.apply(gradient, join, split), None, None
'''


def _attend(run: RunSpec, written: bool) -> Piece:
    """Causal attention over whole sequences; that of transformers needs no mask for it."""
    strategy, spec = run.strategy, run.model
    assert isinstance(spec, ModelSpec)
    ulysses = strategy.context > 1
    held = spec.kv_heads // strategy.tensor
    repeats = strategy.context // math.gcd(held, strategy.context)
    grouped = ", enable_gqa=True" if held * repeats < spec.heads // strategy.tensor else ""
    scaled = "" if written else ", scale=scaling"
    tensors = "q: torch.Tensor, k: torch.Tensor, v: torch.Tensor"
    many = "Causal attention over whole sequences: ranks exchange tokens for heads, and back."
    code = lines(
        f"def attend({tensors}) -> torch.Tensor:" if written else _SIGNATURE,
        f'    """{many if ulysses else "Causal attention, which needs no mask."}"""',
        repeats > 1 and "    # Every rank needs a key and value head of its own.",
        repeats > 1 and f"    k, v = (x.repeat_interleave({repeats}, dim=1) for x in (k, v))",
        ulysses and "    q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))",
        f"    mixed = scaled_dot_product_attention(q, k, v, is_causal=True{scaled}{grouped})",
        ulysses and "    mixed = Exchange.apply(mixed, 2, 1)",
        written and "    return mixed",
        not written and "    return mixed.transpose(1, 2), None",
        not written and _REGISTER,
    )
    used = ["torch", "torch.nn.functional:scaled_dot_product_attention"]
    if not written:
        names = ("AttentionInterface", "AttentionMaskInterface")
        used += ["torch:nn", "typing:Any", *(f"transformers:{name}" for name in names)]
    return Piece(code, tuple(used))


# The name by which a model of transformers finds it.
ATTENTION = "whole_sequences"
_SIGNATURE = """\
def attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:"""
_REGISTER = f"""


AttentionInterface.register("{ATTENTION}", attend)
AttentionMaskInterface.register("{ATTENTION}", lambda *_, **__: None)
"""


def _divide_block(run: RunSpec, written: bool) -> Piece:
    sequence = run.strategy.sequence_parallel
    between = "Shard(1)" if sequence else "Replicate()"
    heads = "SequenceParallel(sequence_dim=2, use_local_output=True)"
    normed = getattr(run.model, "family", "") == "qwen3"
    code = lines(
        "def divide_block(block: nn.Module, mesh: DeviceMesh) -> None:",
        '    """Divide heads and the width of the MLP: two collectives forward, two backward."""',
        f"    between = {between}",
        "    whole = Replicate()",
        "    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=between)",
        "    plan = {",
        _attention_input(written),
        '        "mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=whole),',
        '        **{f"self_attn.{name}_proj": column for name in "qkv"},',
        '        "self_attn.o_proj": row,',
        '        **{f"mlp.{name}_proj": column for name in ("gate", "up")},',
        '        "mlp.down_proj": row,',
        sequence and '        "input_layernorm": SequenceParallel(),',
        sequence and '        "post_attention_layernorm": SequenceParallel(),',
        normed and "        # Their gradients are summed over ranks, which have different heads.",
        normed and f'        **{{f"self_attn.{{name}}_norm": {heads} for name in "qk"}},',
        "    }",
        "    # Every rank has drawn the same weights: none are sent.",
        "    parallelize_module(block, mesh, plan, src_data_rank=None)",
    )
    used = ["torch:nn", "torch.distributed.device_mesh:DeviceMesh", *_STYLES, _REPLICATE]
    used += [_SHARD] if sequence else []
    return Piece(code, (*used, _SEQUENCE) if sequence or normed else tuple(used))


def _attention_input(written: bool) -> str:
    if written:
        return lines(
            '        "self_attn": PrepareModuleInput(',
            "            input_layouts=(between, None, None),",
            "            desired_input_layouts=(whole, None, None),",
            "        ),",
        )
    return lines(
        '        "self_attn": PrepareModuleInput(',
        '            input_kwarg_layouts={"hidden_states": between},',
        '            desired_input_kwarg_layouts={"hidden_states": whole},',
        "        ),",
    )


def _divide_ends(run: RunSpec) -> Piece:
    sequence, tied = run.strategy.sequence_parallel, getattr(run.model, "tied", False)
    between = "Shard(1)" if sequence else "Replicate()"
    code = lines(
        "def divide_ends(model: nn.Module, mesh: DeviceMesh) -> None:",
        '    """Divide the vocabulary of embedding and head; logits stay divided for the loss."""',
        f"    between = {between}",
        "    plan = {",
        '        "model.embed_tokens": RowwiseParallel(',
        "            input_layouts=Replicate(), output_layouts=between",
        "        ),",
        sequence and '        "model.norm": SequenceParallel(),',
        '        "lm_head": ColwiseParallel(',
        "            input_layouts=between, output_layouts=Shard(-1), use_local_output=False",
        "        ),",
        "    }",
        "    parallelize_module(model, mesh, plan, src_data_rank=None)",
        tied and "    # Divided one after the other they became two.",
        tied and "    model.lm_head.weight = model.model.embed_tokens.weight",
    )
    used = ("torch:nn", "torch.distributed.device_mesh:DeviceMesh", *_STYLES, _REPLICATE, _SHARD)
    return Piece(code, (*used, _SEQUENCE) if sequence else used)


def mesh_lines(strategy: Strategy) -> tuple[str, tuple[str, ...]]:
    """Code that makes `mesh`, and what it imports; the axes of `shard` may be those of contexts."""
    sizes = {"shard": "SHARD * CONTEXT" if strategy.context > 1 else "SHARD"}
    if strategy.mesh.replicate > 1:
        sizes = {"replicate": "REPLICATE", **sizes}
    inner = {"tensor": "TENSOR"} if strategy.tensor > 1 else {}
    names = ", ".join(f'"{name}"' for name in (*sizes, *inner))
    shape = ", ".join((*sizes.values(), *inner.values()))
    comma = "," if len(sizes) + len(inner) == 1 else ""
    home = "torch.distributed.device_mesh:"
    if not strategy.tensor_across_nodes:
        return lines(
            f"    axes = ({names}{comma})",
            f"    mesh = init_device_mesh(device.type, ({shape}{comma}), mesh_dim_names=axes)",
        ), (f"{home}init_device_mesh",)
    far = ", ".join((*inner.values(), *sizes.values()))
    return lines(
        "    # The devices of a tensor group lie as far apart as they can.",
        f"    axes = ({names})",
        f"    ranks = torch.arange(world).view({far}).movedim(0, -1)",
        "    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=axes)",
    ), (f"{home}DeviceMesh",)


def context_lines(strategy: Strategy) -> str:
    """Code that finds the ranks of a sequence and the tokens that this one computes."""
    if strategy.context == 1:
        return "    positions = torch.arange(SEQ_LEN, device=device)"
    names = {"data": f"world // ({_inner(strategy)})", "context": "CONTEXT"}
    if strategy.tensor_across_nodes:
        names = {"tensor": "TENSOR", **names}
    elif strategy.tensor > 1:
        names["tensor"] = "TENSOR"
    shape = ", ".join(names.values()).replace("world // (CONTEXT)", "world // CONTEXT")
    axes = ", ".join(f'"{name}"' for name in names)
    return lines(
        f"    sizes, axes = ({shape}), ({axes})",
        '    sequence = init_device_mesh(device.type, sizes, mesh_dim_names=axes)["context"]',
        "    Exchange.group = sequence.get_group()",
        "    # The tokens of every sequence that this rank computes.",
        "    positions = torch.arange(SEQ_LEN, device=device)",
        "    positions = positions.chunk(CONTEXT)[sequence.get_local_rank()]",
    )


def _inner(strategy: Strategy) -> str:
    names = {"CONTEXT": strategy.context, "TENSOR": strategy.tensor}
    return " * ".join(name for name, degree in names.items() if degree > 1)


def data_ranks(strategy: Strategy) -> str:
    """Expressions for which of how many readers of different sequences a rank is."""
    inner = _inner(strategy)
    if strategy.mesh.inner == 1:
        return "rank, world"
    inner = f"({inner})" if "*" in inner else inner
    if not strategy.tensor_across_nodes:
        return f"rank // {inner}, world // {inner}"
    mine = "rank % (world // TENSOR)"
    return f"{mine}{' // CONTEXT' if strategy.context > 1 else ''}, world // {inner}"
