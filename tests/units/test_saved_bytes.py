"""Bytes kept for the backward, per block: formula, trace, and what autograd really saves."""

from __future__ import annotations

import pytest

from shardwise.spec.model import ModelSpec
from shardwise.units.decoder import decoder_units
from tests.gate import in_turn
from tests.units.reduced import build, reduced

pytest.importorskip("torch")
import torch

BATCH, SEQ = 2, 160
FAMILIES = [
    "gpt2",
    "llama",
    "qwen2",
    "gemma",
    "qwen3",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "gpt_neox",
]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def built(spec: ModelSpec, device: str = "meta") -> torch.nn.Module:
    """The module that transformers builds, with the adapters that peft injects."""
    module = build(spec, device=device, attention="sdpa")
    if spec.adapter is None:
        return module
    pytest.importorskip("peft")
    from shardwise.pytorch.adapted import adapt

    return adapt(module, spec.adapter)


def really_saved(spec: ModelSpec, dtype: str, recompute: str) -> list[float]:
    """Per block, bytes per token of the storages autograd packs, each counted where first seen."""
    from torch.utils.checkpoint import checkpoint

    from shardwise.pytorch.blocks import find_blocks

    torch.manual_seed(0)
    module = built(spec, device="cpu").to(getattr(torch, DTYPES[dtype]))
    fixed = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    blocks = list(find_blocks(module).values())
    saved = [0] * len(blocks)
    running: list[int] = []
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage().data_ptr()
        if running and key not in fixed and key not in kept:
            kept[key] = tensor
            saved[running[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    for index, block in enumerate(blocks):
        forward = block.forward
        if recompute == "full":
            forward = lambda *a, f=forward, **k: checkpoint(f, *a, use_reentrant=False, **k)  # noqa: E731

        def watched(*args, index=index, forward=forward, **kwargs):  # type: ignore[no-untyped-def]
            running.append(index)
            try:
                return forward(*args, **kwargs)
            finally:
                running.pop()

        block.forward = watched
    ids = torch.randint(0, spec.vocab, (BATCH, SEQ))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(input_ids=ids, labels=ids).loss
    assert loss.isfinite()
    return [size / (BATCH * SEQ) for size in saved]


@in_turn("family,dtype,recompute", FAMILIES, [*DTYPES], ["none", "full"])
def test_formula_within_ten_and_trace_within_one_percent(
    family: str, dtype: str, recompute: str
) -> None:
    from shardwise.units.module import module_units

    spec = reduced(family)
    truth = really_saved(spec, dtype, recompute)[1:]  # the first also saves what all share
    formula = decoder_units(spec, SEQ, dtype)  # type: ignore[arg-type]
    traced = module_units(build(spec, attention="sdpa"), SEQ, dtype)  # type: ignore[arg-type]
    for index, real in enumerate(truth, start=1):
        by_formula = formula.blocks[index].stage.kept[recompute].activation_bytes  # type: ignore[index]
        by_trace = traced.blocks[index].stage.kept[recompute].activation_bytes  # type: ignore[index]
        assert by_formula == pytest.approx(real, rel=0.10)
        assert by_trace == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_formula_and_trace_agree_under_autocast(family: str) -> None:
    from shardwise.units.module import module_units

    spec = reduced(family)
    formula = decoder_units(spec, SEQ, "bf16", autocast=True)
    traced = module_units(build(spec, attention="sdpa"), SEQ, "bf16", autocast=True)
    for recompute in ("none", "full"):
        one = formula.blocks[1].stage.kept[recompute].activation_bytes  # type: ignore[index]
        other = traced.blocks[1].stage.kept[recompute].activation_bytes  # type: ignore[index]
        assert one == pytest.approx(other, rel=0.10)
    # Norms and the stream between blocks stay in fp32, so it keeps more than plain bf16.
    plain = decoder_units(spec, SEQ, "bf16").blocks[1].stage.kept
    assert formula.blocks[1].stage.kept["full"].activation_bytes == 4 * spec.hidden
    assert plain["full"].activation_bytes == 2 * spec.hidden


def test_a_gpt2_block_by_hand() -> None:
    # In units of hidden x 4 bytes: norm input, qkv input, qkv (3), attention output, second norm's
    # input, up input, then of width 4: up output, tanh, 1 + tanh, x / 2, down input.
    spec = reduced("gpt2")
    widths = 1 + 1 + 3 + 1 + 1 + 1 + 4 * 5
    statistics = 4 * (2 + 2 + spec.heads)  # two norms' mean and scale, log-sum-exp per head
    kept = decoder_units(spec, SEQ, "fp32").blocks[0].stage.kept
    assert kept["none"].activation_bytes == 4 * spec.hidden * widths + statistics
    assert kept["full"].activation_bytes == 4 * spec.hidden


def test_policies_keep_less_the_more_they_recompute() -> None:
    for family in FAMILIES:
        kept = decoder_units(reduced(family), SEQ).blocks[0].stage.kept
        sizes = [kept[policy].activation_bytes for policy in ("none", "selective", "full")]
        assert sizes[0] > sizes[1] > sizes[2] > 0


def test_a_compiler_saves_less_and_never_more() -> None:
    for family in FAMILIES:
        spec = reduced(family)
        eager = decoder_units(spec, SEQ).blocks[0].stage.kept["none"].activation_bytes
        compiled = decoder_units(spec, SEQ, "bf16", True).blocks[0].stage.kept["none"]
        # Where norm and activation are single kernels there is nothing left to fuse.
        assert compiled.activation_bytes <= eager
        if spec.norm != "layernorm":
            assert compiled.activation_bytes < eager


def test_torch_keeps_what_a_matmul_reads_when_it_compiles() -> None:
    # x (10) → linear → a (20) → gelu → b (20) → linear: b is not made again from a.
    from functorch.compile import aot_module, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    kept: list[tuple[int, ...]] = []

    def forward(graph, _):  # type: ignore[no-untyped-def]
        (output,) = graph.graph.find_nodes(op="output")
        kept.extend(tuple(node.meta["val"].shape) for node in output.args[0][1:])
        return make_boxed_func(graph.forward)

    layers = [torch.nn.Linear(10, 20, bias=False), torch.nn.GELU(), torch.nn.Linear(20, 10, False)]
    compiled = aot_module(
        torch.nn.Sequential(*layers),
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    compiled(torch.randn(64, 10, requires_grad=True)).sum().backward()
    tokens = sorted(width for rows, width in kept if rows == 64)
    assert tokens == [10, 20, 20]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_at_work_takes_the_same_by_formula_and_trace(family: str) -> None:
    """The most that is alive in its forward, without what was saved before it."""
    from shardwise.units.module import module_units

    spec = reduced(family, layers=4)
    formula = decoder_units(spec, SEQ, "fp32")
    traced = module_units(build(spec, attention="sdpa"), SEQ, "fp32")
    for by_formula, by_trace in zip(formula.blocks, traced.blocks, strict=True):
        assert by_trace.stage.forward_peak.activation_bytes == pytest.approx(
            by_formula.stage.forward_peak.activation_bytes, rel=0.15
        )
