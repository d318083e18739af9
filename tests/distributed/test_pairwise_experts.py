"""Every pair of settings with expert parallelism, on the engine and as predicted.

Tokens are routed evenly, which is what a prediction assumes.
"""

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
from tests.distributed.agreement import assert_agrees

SIZES: dict[str, Any] = {"layers": 4, "hidden": 128, "head_dim": 16, "ffn": 352, "vocab": 503}
FACTORS: dict[str, tuple[Any, ...]] = {
    "family": ("mixtral", "qwen3_moe"),
    "kind": ("zero3", "zero2", "zero1"),
    # Devices that share the states, replicas, and the devices that divide the experts.
    "layout": ((2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 2)),
    "adapter": (None, "bf16", "fp32"),
    "recompute": ("none", "full", 0.5, "selective"),
    "accumulate": (1, 3),
    "micro_batch": (1, 2),
    "blocks_per_unit": (1, 2),
    "split_root": (False, True),
    "prefetch": (1, 0, 2),
    "forward_prefetch": (0, 1),
    "loss": ("plain", "chunked"),
    "param_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("fp32", "bf16"),
    "grad_sync": (None, "every", "last"),
}
SEQ_LEN = 128


def possible(chosen: Chosen) -> bool:
    # Frozen experts that one device holds whole are predicted to take up to 5 % more.
    shard, _, expert = chosen.get("layout", (0, 1, 1))
    return not (chosen.get("adapter") and shard == expert)


def model_of(case: Chosen) -> ModelSpec:
    model = reduced(case["family"], experts=8, experts_per_token=2, **SIZES)
    if case["adapter"] is None:
        return model
    return model.but(adapter=Adapter.read({"rank": 8, "base": case["adapter"]}))


@pairwise(FACTORS, possible, gate=12)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    shard, replicate, expert = case["layout"]
    outside = ("family", "layout", "adapter")
    settings = {k: v for k, v in case.items() if k not in outside}
    strategy = Strategy.read({**settings, "shard": shard, "replicate": replicate, "expert": expert})
    devices = shard * replicate
    assert_agrees(workers, model_of(case), strategy.resolve(devices, devices), SEQ_LEN)
