"""FLOPs against torch's own counter, on reduced models with the score matrix written out."""

from __future__ import annotations

import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.work import predict_work
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from tests.gate import in_turn
from tests.units.reduced import build, reduced

torch = pytest.importorskip("torch")

BATCH, SEQ = 2, 96
FAMILIES = [
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "mpt",
    "olmo2",
    "phi",
    "phi3",
    "gpt_neox",
    "opt",
]


def counted(spec: ModelSpec, recompute: str) -> tuple[float, float]:
    """Forward, and forward + backward FLOPs per token that torch counts."""
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    module = build(spec, device="cpu", attention="eager")
    if recompute != "none":
        context = _selective_context if recompute == "selective" else None
        for block in _blocks(module):
            _wrap(block, checkpoint, context)
    ids = torch.randint(0, spec.vocab, (BATCH, SEQ))
    with FlopCounterMode(display=False) as forward:
        loss = module(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    tokens = BATCH * SEQ
    first = forward.get_total_flops() / tokens
    return first, first + backward.get_total_flops() / tokens


def _blocks(module):  # type: ignore[no-untyped-def]
    from shardwise.pytorch.blocks import find_blocks

    return find_blocks(module).values()


def _wrap(block, checkpoint, context) -> None:  # type: ignore[no-untyped-def]
    forward = block.forward
    settings = {"use_reentrant": False} | ({"context_fn": context} if context else {})
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, **settings, **kwargs)


def _selective_context():  # type: ignore[no-untyped-def]
    """Keep attention and the first of every two matmuls: what `selective` stands for."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    counts = {False: 0, True: 0}
    aten = torch.ops.aten

    def policy(context, op, *args, **kwargs):  # type: ignore[no-untyped-def]
        if op in (aten.mm.default, aten.addmm.default):
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            # With the scores written out, attention is two batched products.
            keep = op == aten.bmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def predicted(spec: ModelSpec, recompute: str) -> tuple[float, float]:
    units = decoder_units(spec, SEQ, "fp32")
    strategy = Strategy(kind="single", recompute=recompute).resolve(1, 1)
    work = predict_work(units, Configurations.of([strategy]))
    return units.forward_flops(), float(work.hardware_flops[0] / work.tokens[0])


@in_turn("family,recompute", FAMILIES, ["none", "selective", "full"])
def test_flops_are_those_torch_counts(family: str, recompute: str) -> None:
    spec = reduced(family)
    for ours, theirs in zip(predicted(spec, recompute), counted(spec, recompute), strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)


def test_the_closed_form_of_a_gpt() -> None:
    # 24·L·H²·(1 + s/(6H)) for the blocks, 2·H·V for the head (facts 1.1).
    spec = reduced("gpt2", hidden=512, heads=8, kv_heads=8, ffn=2048)
    blocks = 24 * spec.layers * spec.hidden**2 * (1 + SEQ / (6 * spec.hidden))
    head = 2 * spec.hidden * spec.vocab
    assert decoder_units(spec, SEQ).forward_flops() == pytest.approx(blocks + head, rel=1e-12)


def test_a_mixture_computes_only_the_experts_it_chooses() -> None:
    spec = reduced("mixtral")
    one = decoder_units(spec.but(experts_per_token=1), SEQ).forward_flops()
    two = decoder_units(spec, SEQ).forward_flops()
    assert two - one == spec.layers * 3 * 2 * spec.ffn * spec.hidden


def test_a_window_bounds_the_work_of_attention() -> None:
    spec = reduced("gemma3_text", layers=6)
    units = decoder_units(spec, 512)
    width = spec.heads * spec.head_dim
    work = [block.stage.attention_flops for block in units.blocks]
    # Five blocks see 32 positions, every sixth sees all 512.
    assert work == [4 * 32 * width] * 5 + [4 * 512 * width]
