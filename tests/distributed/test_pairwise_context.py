"""Every pair of settings with context parallelism, on the engine and as predicted.

Each pair of values of two settings occurs in a case. Calls and bytes of every collective, by axis,
and bytes of states are exact; peaks are within 3 %.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from tests.distributed.workers import Workers
from tests.pairwise import Chosen, pairwise
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.agreement import assert_agrees

SIZES: dict[str, Any] = {
    "layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn": 352,
    "vocab": 1024,
}  # fmt: skip
MODELS: dict[str, ModelSpec] = {
    "llama": reduced("llama", **SIZES),
    # Fewer key-value heads than processes: they are repeated.
    "two kv heads": reduced("llama", **{**SIZES, "kv_heads": 2}),
    "tied": reduced("llama", **SIZES, tied=True),
    "qwen3": reduced("qwen3", **SIZES),
    "phi": reduced("phi", **{**SIZES, "kv_heads": 8}),
    "qwen2": reduced("qwen2", **SIZES),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "kind": ("zero3", "zero2", "zero1"),
    # Replicate, shard, context and tensor.
    "layout": ((1, 2, 2, 1), (1, 1, 4, 1), (1, 1, 2, 2), (1, 1, 2, 1), (2, 1, 2, 1)),
    "recompute": ("none", "full", 0.5, "selective"),
    "accumulate": (1, 2),
    "micro_batch": (1, 3),
    "param_dtype": ("bf16", "fp32"),
    "blocks_per_unit": (1, 2),
    "loss": ("plain", "chunked"),
    "split_root": (False, True),
    "prefetch": (1, 0, 2),
}
SEQ_LEN = 128


def possible(chosen: Chosen) -> bool:
    if chosen.get("split_root") and chosen.get("model") == "tied":
        return False
    return not (chosen.get("loss") == "chunked" and chosen.get("layout") == (1, 1, 2, 2))


def strategy_of(case: Chosen) -> Strategy:
    replicate, shard, context, tensor = case["layout"]
    settings = {k: v for k, v in case.items() if k not in ("model", "layout")}
    degrees = {"replicate": replicate, "shard": shard, "context": context, "tensor": tensor}
    devices = replicate * shard * context * tensor
    return Strategy.read({**settings, **degrees}).resolve(devices, devices)


@pairwise(FACTORS, possible, gate=6)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    assert_agrees(workers, MODELS[case["model"]], strategy_of(case), SEQ_LEN)
