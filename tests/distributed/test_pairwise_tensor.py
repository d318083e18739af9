"""Every pair of settings with tensor parallelism, on the engine and as predicted.

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
    "vocab": 2048,
}  # fmt: skip
MODELS: dict[str, ModelSpec] = {
    "llama": reduced("llama", **SIZES),
    "tied": reduced("llama", **SIZES, tied=True),
    "qwen3": reduced("qwen3", **SIZES),
    "phi": reduced("phi", **{**SIZES, "kv_heads": 8}),
    "gemma": reduced("gemma", **SIZES),
    # The last device of a group has fewer rows.
    "odd vocabulary": reduced("llama", **{**SIZES, "vocab": 2003}),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "kind": ("zero3", "zero2", "zero1", "ddp"),
    # Shard and tensor.
    "layout": ((2, 2), (1, 4), (1, 2)),
    "sequence_parallel": (True, False),
    "recompute": ("none", "full", 0.5, "selective"),
    "accumulate": (1, 2),
    "micro_batch": (1, 3),
    "param_dtype": ("bf16", "fp32"),
    "blocks_per_unit": (1, 2),
    "prefetch": (1, 0, 2),
    "split_root": (False, True),
    "grad_sync": (None, "last"),
}
SEQ_LEN = 64


def possible(chosen: Chosen) -> bool:
    split = chosen.get("split_root")
    if split and (chosen.get("kind") == "ddp" or chosen.get("model") in ("tied", "gemma")):
        return False
    # Nothing is gathered again where each device has all that its group shares.
    return not (chosen.get("kind") == "ddp" and chosen.get("blocks_per_unit") == 2)


@pairwise(FACTORS, possible, gate=6)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    # Peaks of ranks that have run other meshes are higher: DTensor keeps what it made for those.
    workers.close()
    shard, tensor = case["layout"]
    settings = {k: v for k, v in case.items() if k not in ("model", "layout")}
    degrees: dict[str, Any] = {"shard": shard, "replicate": 1, "tensor": tensor}
    if case["kind"] == "ddp":
        degrees |= {"shard": 1, "replicate": shard}
    strategy = Strategy.read({**settings, **degrees})
    devices = shard * tensor
    assert_agrees(workers, MODELS[case["model"]], strategy.resolve(devices, devices), SEQ_LEN)
