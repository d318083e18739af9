"""Every pair of settings of model states and offload, on the engine and as predicted.

State bytes and bytes of states on the host are equal; memory is within 3 %. Activations that are
offloaded leave the device: their copies on the host, which on a CPU is the same memory, are counted
apart.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer_sharding import is_trained_with
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from tests.distributed.workers import Workers
from tests.pairwise import Chosen, pairwise
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("torchao")
from tests.distributed.agreement import assert_agrees

SIZES: dict[str, Any] = {"layers": 4, "hidden": 64, "head_dim": 16, "ffn": 176, "vocab": 499}
MODELS: dict[str, ModelSpec] = {
    "untied": reduced("llama", **SIZES),
    "tied": reduced("llama", **SIZES, tied=True),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "states": ("fp32", "bf16", "bf16+stochastic"),
    "offload": (
        False,
        True,
        "optimizer",
        "activations",
        "optimizer+activations",
        "parameters+activations",
    ),
    "kind": ("zero3", "zero2", "ddp", "single"),
    "layout": ((2, 1), (2, 2), (1, 1)),
    "optimizer": ("adamw", "adam", "momentum", "sgd", "adamw-8bit"),
    "recompute": ("none", "full", 0.5),
    "accumulate": (1, 2),
    "param_dtype": ("bf16", "fp32"),
    "model": tuple(MODELS),
}
SEQ_LEN = 128
USUAL: Chosen = {"kind": "zero3", "layout": (2, 1), "optimizer": "adamw"}


def strategy_of(case: Chosen) -> Strategy:
    shard, replicate = case["layout"]
    if case["kind"] == "ddp":
        shard, replicate = 1, shard * replicate
    named = ("kind", "states", "offload", "recompute", "accumulate", "param_dtype")
    settings = {name: case[name] for name in named if name in case}
    read = Strategy.read({**settings, "shard": shard, "replicate": replicate, "micro_batch": 6})
    return read.resolve(shard * replicate, shard * replicate)


def possible(chosen: Chosen) -> bool:
    """Whether a strategy accepts what is chosen so far, and the trainer its optimizer."""
    kind, layout = chosen.get("kind"), chosen.get("layout")
    if layout is not None and kind is not None and (layout == (1, 1)) != (kind == "single"):
        return False
    if layout == (2, 2) and kind == "ddp":
        return False
    # Pure bf16 is for compute in bf16.
    if chosen.get("states", "fp32") != "fp32" and chosen.get("param_dtype") == "fp32":
        return False
    layout = layout or ((1, 1) if kind == "single" else (2, 1))
    if layout == (1, 1):
        kind = "single"
    # A choice of the others may make what is unset possible.
    if kind is None and chosen.get("offload") not in (None, False):
        kind = "zero3"
    # The most recomputation allows the most; autocast ends with equal dtypes.
    free = {"recompute": "full", **chosen}
    try:
        strategy = strategy_of({**USUAL, **free, "kind": kind or "zero3", "layout": layout})
    except SpecError:
        return False
    return is_trained_with(chosen.get("optimizer", "adamw"), strategy)


@pairwise(FACTORS, possible, gate=6)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    strategy = strategy_of(case)
    assert_agrees(workers, MODELS[case["model"]], strategy, SEQ_LEN, optimizer=case["optimizer"])
