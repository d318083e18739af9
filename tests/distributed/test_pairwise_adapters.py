"""Every pair of settings of adapters and how they are sharded, on the engine and as predicted."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.adapter import Adapter
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from tests.distributed.workers import Workers
from tests.pairwise import Chosen, pairwise
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("torchao")
from tests.distributed.agreement import assert_agrees

# Matrices that can be quantised on 2 ranks, and of which some cannot on 4.
SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "head_dim": 64, "ffn": 512, "vocab": 2003}
MODELS: dict[str, ModelSpec] = {
    "untied": reduced("llama", **SIZES),
    "tied": reduced("llama", **SIZES, tied=True),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8},
    "large": {"rank": 32},
    "queries": {"rank": 8, "targets": ("q_proj", "v_proj")},
    "down": {"rank": 8, "targets": ("down_proj",)},
    "last blocks": {"train": ("layers.2.", "layers.3.")},
    "norms too": {"rank": 8, "train": ("layernorm",)},
    "head too": {"rank": 8, "targets": ("q_proj",), "train": ("lm_head",)},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "adapter": tuple(ADAPTERS),
    "base": ("bf16", "fp32", "nf4"),
    "kind": ("zero3", "zero2", "zero1", "ddp"),
    "layout": ((2, 1), (4, 1), (2, 2)),
    "loss": ("plain", "chunked"),
    "split_root": (False, True),
    "blocks_per_unit": (1, 2),
    "recompute": ("none", "full", 0.5, "selective"),
    "accumulate": (1, 2),
    "micro_batch": (1, 3),
    "param_dtype": ("bf16", "fp32"),
    "prefetch": (1, 2),
}
SEQ_LEN = 64


def possible(chosen: Chosen) -> bool:
    kind, split, adapter = (chosen.get(name) for name in ("kind", "split_root", "adapter"))
    if kind == "ddp" and (chosen.get("layout") == (2, 2) or split):
        return False
    if chosen.get("model") == "tied" and (split or adapter == "head too"):
        return False
    # Without autocast nothing casts frozen weights, and quantised ones are bf16 when used.
    base, dtype = chosen.get("base"), chosen.get("param_dtype")
    return not (dtype == "fp32" and (base == "nf4" or (kind == "ddp" and base == "bf16")))


@pairwise(FACTORS, possible, gate=6)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    shard, replicate = case["layout"]
    if case["kind"] == "ddp":
        shard, replicate = 1, shard * replicate
    outside = ("model", "layout", "adapter", "base")
    settings = {k: v for k, v in case.items() if k not in outside}
    strategy = Strategy.read({**settings, "shard": shard, "replicate": replicate})
    adapter = Adapter.read({**ADAPTERS[case["adapter"]], "base": case["base"]})
    devices = shard * replicate
    assert_agrees(
        workers,
        MODELS[case["model"]].but(adapter=adapter),
        strategy.resolve(devices, devices),
        SEQ_LEN,
    )
