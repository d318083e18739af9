"""Blocks with adapters: parameters, saved bytes and FLOPs by formula, by trace, and as they are."""

from __future__ import annotations

import pytest

from shardwise.spec.adapter import read_adapter
from shardwise.spec.record import SpecError
from shardwise.units.decoder import decoder_units
from shardwise.units.division import Division
from tests.gate import in_turn
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
from shardwise.units.module import module_units
from tests.units.test_saved_bytes import SEQ, built, really_saved

QUERIES = {"gpt2": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value"}
FAMILIES = ["llama", "qwen2", "gemma", "phi", "gpt2", "phi3", "gpt_neox", "olmo2"]


@in_turn("family,targets,dtype", FAMILIES, ["all-linear", "queries"], ["fp32", "bf16"])
def test_formula_within_ten_and_trace_within_one_percent(
    family: str, targets: str, dtype: str
) -> None:
    names = "all-linear" if targets == "all-linear" else QUERIES.get(family, "q_proj,v_proj")
    adapter = read_adapter({"rank": 8, "targets": tuple(names.split(","))})
    spec = reduced(family).but(adapter=adapter)
    real = really_saved(spec, dtype, "none")[1]  # the first also saves what all share
    formula = decoder_units(spec, SEQ, dtype).blocks[1]  # type: ignore[arg-type]
    traced = module_units(built(spec), SEQ, dtype).blocks[1]  # type: ignore[arg-type]
    assert formula.stage.kept["none"].activation_bytes == pytest.approx(real, rel=0.10)
    assert traced.stage.kept["none"].activation_bytes == pytest.approx(real, rel=0.01)
    assert formula.stage.matmul_flops == pytest.approx(traced.stage.matmul_flops, rel=0.01)
    assert formula.stage.backward_matmul_flops == pytest.approx(
        traced.stage.backward_matmul_flops, rel=0.01
    )
    assert (formula.numel, formula.trained_numel) == (traced.numel, traced.trained_numel)
    assert {p.stored for p in formula.parameters} == {None, 2.0}
    assert [p.trainable for p in formula.parameters].count(True) == sum(
        p.stored is None for p in traced.parameters
    )


def test_flops_of_a_backward_without_weight_gradients_by_hand() -> None:
    spec = reduced("llama")
    full = decoder_units(spec, SEQ).blocks[1].stage
    adapted = decoder_units(spec.but(adapter=read_adapter("lora:8")), SEQ).blocks[1].stage
    # The products of frozen weights have one gradient, those of adapters have two.
    added = adapted.matmul_flops - full.matmul_flops
    assert added > 0
    assert adapted.backward_matmul_flops == full.matmul_flops + 2 * added


def test_nothing_before_the_first_block_needs_a_gradient() -> None:
    spec = reduced("llama").but(adapter=read_adapter("lora:8"))
    first, second = decoder_units(spec, SEQ).blocks[:2]
    assert first.stage.backward_matmul_flops < second.stage.backward_matmul_flops
    assert first.stage.kept["none"].activation_bytes < second.stage.kept["none"].activation_bytes


def test_matrices_of_blocks_are_quantised_where_devices_hold_whole_blocks_of_them() -> None:
    spec = reduced("llama", hidden=256, head_dim=64, ffn=512).but(adapter=read_adapter("qlora:8"))
    block = decoder_units(spec, SEQ).blocks[1]
    matrices = {p.name for p in block.packed(1)}
    assert matrices == {p.name for p in block.parameters if not p.trainable and len(p.shape) == 2}
    assert {p.name for p in block.packed(2)} == matrices
    # 256 x 256 elements are 4 blocks of 16,384.
    assert not block.packed(64)
    weight = next(p for p in block.packed(2) if p.name == "attention.q.weight")
    assert weight.packed_bytes(2) == weight.numel * (0.5 + 1 / 64 + 2 / (64 * 256))
    root = decoder_units(spec, SEQ).root
    assert not root.packed(1)
    assert all(p.stored == 2.0 and not p.trainable for p in root.parameters)


MIXTURE = reduced("qwen3_moe", hidden=256, head_dim=64, ffn=256, experts=8, experts_per_token=2)
EXPERTS = ("mlp.experts.gate_up", "mlp.experts.down")


def test_stacked_experts_are_quantised_and_dequantised_for_one_product_at_a_time() -> None:
    block = decoder_units(MIXTURE.but(adapter=read_adapter("qlora:8")), SEQ).blocks[1]
    packed = {p.name: p for p in block.packed(2)}
    assert packed.keys() >= set(EXPERTS)
    up = packed[EXPERTS[0]]
    assert up.stored_bytes(1) == 8 * 512 * 256 * (0.5 + 1 / 64 + 2 / (64 * 256)) + 34
    assert packed.keys() & {"mlp.router.weight", "attention_norm.weight"} == set()
    # One copy in bf16, and torchao's temporaries of one expert.
    moments = [m for m in block.stage.backward if m.copied == up.name]
    assert max(m.copied_bytes for m in moments) == pytest.approx(2 + (14 + 2 / 64) / 8)
    # Rows of all experts are shared among devices that do not divide the experts.
    assert up.is_packed(16)
    assert up.sharded_dim(16) == 0


def test_experts_stay_in_bf16_where_a_stack_quantises_linear_layers_alone() -> None:
    kept = read_adapter({"rank": 8, "base": "nf4", "quantised_experts": False})
    block = decoder_units(MIXTURE.but(adapter=kept), SEQ).blocks[1]
    experts = [p for p in block.parameters if p.name in EXPERTS]
    assert [p.stored for p in experts] == [2.0, 2.0]
    assert not {p.name for p in block.packed(1)} & set(EXPERTS)
    assert {"attention.q.weight"} <= {p.name for p in block.packed(1)}


def test_stored_experts_are_not_divided() -> None:
    spec = MIXTURE.but(adapter=read_adapter("qlora:8"))
    with pytest.raises(SpecError, match="quantised_experts = false"):
        decoder_units(spec, SEQ, division=Division(expert=2))


def test_gpt2_stores_its_matrices_in_a_way_that_cannot_be_quantised() -> None:
    spec = reduced("gpt2", hidden=256).but(adapter=read_adapter("qlora:8"))
    assert not decoder_units(spec, SEQ).blocks[1].packed(1)


def test_a_target_that_does_not_exist_is_named() -> None:
    spec = reduced("llama").but(adapter=read_adapter("lora:8:q_prj"))
    with pytest.raises(SpecError, match="no linear layer 'q_prj'.*q_proj"):
        decoder_units(spec, SEQ)
