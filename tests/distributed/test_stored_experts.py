"""Experts stored in 4 bits on real processes: bytes, calls and peaks as predicted, same losses."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.adapter import Adapter
from shardwise.spec.strategy import Strategy
from tests.distributed.workers import Workers
from tests.gate import first_in_gate
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("torchao")
from tests.distributed.agreement import assert_agrees

MIXTURE = reduced(
    "qwen3_moe", hidden=256, heads=4, head_dim=64, ffn=256, vocab=1009, tied=False,
    experts=8, experts_per_token=2,
)  # fmt: skip
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"kind": "zero3", "recompute": "full"}, {}),
    (1, {"kind": "single"}, {}),
    (2, {"kind": "zero3"}, {}),
    (2, {"kind": "zero2", "accumulate": 2}, {}),
    (2, {"kind": "ddp", "recompute": "full"}, {}),
    (4, {"kind": "zero3", "shard": 2, "micro_batch": 2}, {"targets": ["q_proj"]}),
    (2, {"kind": "zero3", "recompute": "selective"}, {}),
    (2, {"kind": "zero3"}, {"quantised_experts": False}),
]


@pytest.mark.parametrize(("processes", "strategy", "adapter"), first_in_gate(2, CASES), ids=str)
def test_stored_experts_take_what_is_predicted(
    processes: int, strategy: dict[str, Any], adapter: dict[str, Any], workers: Workers
) -> None:
    how = Strategy.read(strategy).resolve(processes, processes)
    model = MIXTURE.but(adapter=Adapter.read({"rank": 4, "base": "nf4", **adapter}))
    assert_agrees(workers, model, how, 64)
