"""Frozen weights in fp8: their bytes in memory and on the wire, and where they are refused."""

from __future__ import annotations

from typing import Any

import pytest

import shardwise
from shardwise.engine.adapter import check_adapter
from shardwise.spec.adapter import Adapter
from shardwise.spec.catalogue import model as preset
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import StepProfile

SHAPE = preset("llama-2-70b")
# The seven matrices of a block: attention with 8 of 64 heads for keys and values, gate, up, down.
BLOCK = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
MATRICES = 80 * BLOCK
# Embedding and head, and the gains of norms, stay in bf16.
REST = 2 * 32000 * 8192 + (2 * 80 + 1) * 8192
# LoRA of rank 16 on query and output, in fp32.
LORA = 80 * 2 * 16 * (8192 + 8192)


def estimate(kind: str, base: str, cluster: str = "8xB200", **strategy: Any) -> StepProfile:
    fields = {"kind": kind, "linear_dtype": "fp8", "compile": True, **strategy}
    adapter = Adapter.read({"rank": 16, "base": base, "targets": ["q_proj", "o_proj"]})
    return shardwise.estimate(
        "llama-2-70b", cluster, adapter=adapter, seq_len=8192, strategy=Strategy.read(fields)
    )


def terms_of(kind: str, base: str) -> dict[str, int]:
    memory = estimate(kind, base).memory
    assert memory is not None
    return dict(memory.terms)


def test_matrices_of_blocks_take_a_byte_and_the_rest_two() -> None:
    for base, itemsize in (("fp8", 1), ("bf16", 2)):
        terms = terms_of("ddp", base)
        assert terms["parameters"] == itemsize * MATRICES + 2 * REST + 4 * LORA
    # Nothing is dequantised: all other terms are those of bf16.
    low, wide = terms_of("ddp", "fp8"), terms_of("ddp", "bf16")
    assert {k: v for k, v in low.items() if k != "parameters"} == {
        k: v for k, v in wide.items() if k != "parameters"
    }


def test_sharded_weights_are_gathered_as_they_are_stored() -> None:
    """A block is gathered in the forward and again in the backward."""
    sent = {base: sum(c.bytes for c in estimate("zero3", base).traffic) for base in ("fp8", "bf16")}
    assert sent["bf16"] - sent["fp8"] == 2 * MATRICES


@pytest.mark.parametrize(
    ("change", "told"),
    [({"linear_dtype": None}, "linear_dtype"), ({"cluster": "8xH100-SXM"}, "transposed")],
)
def test_where_no_stack_multiplies_them_they_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        estimate("ddp", "fp8", **change)


def test_our_trainer_refuses_them() -> None:
    adapter = Adapter.read({"rank": 16, "base": "fp8"})
    with pytest.raises(SpecError, match='set base = "bf16"'):
        check_adapter(adapter, Strategy(kind="zero3"))
