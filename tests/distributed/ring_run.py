"""Ring attention by torch's own templates with the CPU's kernel, in a model of two blocks.

The public `context_parallel` finds no kernel on a CPU; the templates that it is made of take one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.mesh import world
from shardwise.spec.model import ModelSpec
from shardwise.trials.accept.parity import compute_norms_exactly
from tests.units.reduced import build

templates: Any = _attention
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    """Attention of one part of the sequence, to which keys and values of all parts come."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        def kernel(q: Any, k: Any, v: Any, is_causal: bool, **settings: Any) -> Any:
            return _FORWARD(q, k, v, 0.0, is_causal, **settings)

        out, lse, *_ = templates._templated_ring_attention(
            dist.group.WORLD, 2, kernel, q, k, v, is_causal=True, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        def kernel(is_causal: bool, scale: float, **tensors: Any) -> Any:
            names = ("grad_out", "query", "key", "value", "out", "logsumexp")
            return _BACKWARD(*(tensors[name] for name in names), 0.0, is_causal, scale=scale)

        q, k, v, out, lse = ctx.saved_tensors
        gradients = templates._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, grad_out=gradient.contiguous(), grad_out_name="grad_out",
            query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=True, scale=ctx.scale,
        )  # fmt: skip
        return *gradients[:3], None


def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
    """The attention function: the CPU's kernel has no groups of heads, so all are expanded."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(repeats, dim=1) for one in (k, v))
    return Ring.apply(q, k, v, scaling).transpose(1, 2), None


def part_of(seq_len: int, rank: int, size: int, balanced: bool) -> torch.Tensor:
    """The positions of a rank: one piece, or one from either end, for equal work."""
    if not balanced:
        return torch.arange(seq_len).chunk(size)[rank]
    pieces = torch.arange(seq_len).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def ring(case: dict[str, Any]) -> dict[str, Any]:
    """The error of all gradients against whole sequences, and collectives of either pass."""
    AttentionInterface.register("ring_of_templates", attend)
    AttentionMaskInterface.register("ring_of_templates", lambda *_, **__: None)
    templates._cp_options.convert_to_f32 = False
    templates._cp_options.enable_load_balance = case["balanced"]
    templates.set_rotate_method(case["rotate"])
    spec, (rank, size) = ModelSpec.model_validate(case["model"]), world()
    batch, seq_len = case["batch"], case["seq_len"]
    data = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(0, spec.vocab, (2, batch, seq_len), generator=data)
    models = []
    for attention in ("sdpa", "ring_of_templates"):
        torch.manual_seed(0)
        model = build(spec, device="cpu", attention=attention).double()
        compute_norms_exactly(model)
        models.append(model)
    whole, divided = models
    mine = part_of(seq_len, rank, size, case["balanced"])
    cross_entropy(whole(input_ids=ids).logits.flatten(0, 1), targets.flatten()).backward()
    with CollectiveCounter() as forward:
        logits = divided(input_ids=ids[:, mine], position_ids=mine[None]).logits
    loss = cross_entropy(logits.flatten(0, 1), targets[:, mine].flatten()) / size
    with CollectiveCounter() as backward:
        loss.backward()
    worst = 0.0
    for one, other in zip(divided.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(one.grad)
        worst = max(worst, float((one.grad - other.grad).abs().max() / other.grad.abs().max()))
    counted = {
        name: {op: tuple(n) for (op, _, _), n in counter.counts.items()}
        for name, counter in (("forward", forward), ("backward", backward))
    }
    return {"error": worst, **counted}
