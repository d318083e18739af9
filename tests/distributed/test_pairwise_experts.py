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
    "layout": ((4, 1, 2), (2, 1, 2), (4, 1, 4), (2, 2, 2)),
    "experts": (8, 4),
    "recompute": ("none", "full", 0.5, "selective", 0.25, 0.75),
    "accumulate": (1, 3),
    "micro_batch": (1, 2, 3),
    "blocks_per_unit": (1, 2),
    "split_root": (False, True),
    "prefetch": (1, 0, 2),
    "forward_prefetch": (0, 1),
    "loss": ("plain", "chunked"),
    "param_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("fp32", "bf16"),
    "grad_sync": (None, "every", "last"),
}
# Adapters are trained, and the experts are frozen.
ADAPTED: dict[str, tuple[Any, ...]] = {
    "base": ("bf16", "fp32"),
    **{
        name: FACTORS[name]
        for name in (
            "family", "kind", "layout", "experts", "accumulate", "blocks_per_unit", "split_root",
            "loss", "param_dtype",
        )
    },
    "recompute": ("none", "full", 0.5, "selective"),
    "micro_batch": (1, 3),
    "prefetch": (1, 2),
}  # fmt: skip
SEQ_LEN = 128


def possible(chosen: Chosen) -> bool:
    return True


def model_of(case: Chosen) -> ModelSpec:
    return reduced(case["family"], experts=case["experts"], experts_per_token=2, **SIZES)


@pairwise(FACTORS, possible, gate=12)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    shard, replicate, expert = case["layout"]
    outside = ("family", "layout", "experts")
    settings = {k: v for k, v in case.items() if k not in outside}
    strategy = Strategy.read({**settings, "shard": shard, "replicate": replicate, "expert": expert})
    devices = shard * replicate
    assert_agrees(workers, model_of(case), strategy.resolve(devices, devices), SEQ_LEN)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({"expert": 2}, ("experts",)),
        ({"expert": 2}, ("self_attn",)),
        ({"expert": 2, "recompute": "full", "accumulate": 2}, ("embed",)),
        ({"expert": 4, "kind": "zero2"}, ("embed", "lm_head")),
    ],
)
def test_traced_experts_are_divided(
    settings: dict[str, Any], frozen: tuple[str, ...], workers: Workers
) -> None:
    strategy = Strategy.read({"kind": "zero3", **settings}).resolve(4, 4)
    model = reduced("mixtral", experts=8, experts_per_token=2, **SIZES)
    assert_agrees(workers, model, strategy, SEQ_LEN, frozen)


@pairwise(ADAPTED, possible, gate=1)
def test_frozen_experts_are_divided(case: Chosen, workers: Workers) -> None:
    """Beside trained adapters."""
    shard, replicate, expert = case["layout"]
    outside = ("family", "layout", "experts", "base")
    settings = {k: v for k, v in case.items() if k not in outside}
    strategy = Strategy.read({**settings, "shard": shard, "replicate": replicate, "expert": expert})
    adapter = Adapter.read({"rank": 8, "base": case["base"]})
    devices = shard * replicate
    model = model_of(case).but(adapter=adapter)
    assert_agrees(workers, model, strategy.resolve(devices, devices), SEQ_LEN)
