"""Every pair of settings that decide units and the loss, on the engine and as predicted.

Each pair of values of two settings occurs in a case: a chunked loss, embedding and head in units of
their own, several blocks to a unit with a part of them recomputed, and parts of the model frozen.
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

# A head that is larger than a block, and logits that are larger than its activations.
SIZES: dict[str, Any] = {"layers": 5, "hidden": 64, "head_dim": 16, "ffn": 176, "vocab": 2003}
MODELS: dict[str, ModelSpec] = {
    "untied": reduced("llama", **SIZES),
    "tied": reduced("llama", **SIZES, tied=True),
}
FROZEN: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "mlp": ("mlp",),
    "below": ("embed", "layers.0.", "layers.1."),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "kind": ("zero3", "zero2", "zero1", "ddp"),
    "layout": ((2, 1), (4, 1), (2, 2)),
    "loss": ("plain", "chunked"),
    "loss_chunks": (8, 3),
    "split_root": (False, True),
    "blocks_per_unit": (1, 2, 3),
    "recompute": ("none", "full", 0.4, "selective"),
    "accumulate": (1, 2),
    "micro_batch": (1, 3),
    "param_dtype": ("bf16", "fp32"),
    "frozen": tuple(FROZEN),
    "grad_sync": (None, "last"),
    "prefetch": (1, 0, 2),
}
SEQ_LEN = 64


def possible(chosen: Chosen) -> bool:
    kind, split = chosen.get("kind"), chosen.get("split_root")
    if kind == "ddp" and (chosen.get("layout") == (2, 2) or split):
        return False
    # A tied table is one unit, and frozen with the embedding the head is too.
    if chosen.get("model") == "tied" and (split or chosen.get("frozen") == "below"):
        return False
    return not (chosen.get("loss") == "plain" and chosen.get("loss_chunks") == 3)


@pairwise(FACTORS, possible, gate=8)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    shard, replicate = case["layout"]
    if case["kind"] == "ddp":
        shard, replicate = 1, shard * replicate
    settings = {k: v for k, v in case.items() if k not in ("model", "layout", "frozen")}
    strategy = Strategy.read({**settings, "shard": shard, "replicate": replicate})
    devices = shard * replicate
    assert_agrees(
        workers,
        MODELS[case["model"]],
        strategy.resolve(devices, devices),
        SEQ_LEN,
        FROZEN[case["frozen"]],
    )
