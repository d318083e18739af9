"""Every pair of settings of a Strategy, on the engine and as predicted.

Each pair of values of two settings that a Strategy accepts occurs in a case: its collectives are
predicted to the byte and its peak memory within 3 %.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from tests.distributed.workers import Workers
from tests.pairwise import Chosen, all_pairs, can_occur, covering, held_pairs, pairwise
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.agreement import assert_agrees

MODELS = {
    "llama": reduced("llama", layers=4, hidden=128, head_dim=32, ffn=344, vocab=503),
    "gpt2": reduced("gpt2", layers=3, hidden=128, head_dim=32, ffn=512, vocab=2001),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "kind": ("zero3", "zero2", "zero1", "ddp"),
    # Groups that parameters are sharded over, and how many replicas of them there are.
    "layout": ((2, 1), (4, 1), (2, 2)),
    "reshard_after_forward": (None, False, True, 2),
    "reshard_after_backward": (None, False, True),
    "grad_sync": (None, "every", "local", "last"),
    "accumulate": (1, 3),
    "micro_batch": (1, 2),
    "recompute": ("none", "selective", "full", 0.5),
    "blocks_per_unit": (1, 2),
    "prefetch": (1, 0, 2),
    "forward_prefetch": (0, 1, 2),
    "param_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("fp32", "bf16"),
    "offload": (False, True),
    "ddp_bucket_mib": (None, 1.0),
}
SEQ_LEN = 64


def possible(chosen: Chosen) -> bool:
    """Whether a Strategy accepts what is chosen so far."""
    kind, layout = chosen.get("kind"), chosen.get("layout")
    if kind == "ddp" and (layout == (2, 2) or chosen.get("offload")):
        return False
    gathered_again = chosen.get("reshard_after_forward") not in (None, False)
    return not (gathered_again and kind in ("ddp", "zero1", "zero2"))


def strategy_of(case: Chosen) -> Strategy:
    shard, replicate = case["layout"]
    settings = {k: v for k, v in case.items() if k not in ("model", "layout")}
    if case["kind"] == "ddp":
        shard, replicate = (shard, replicate) if replicate > 1 else (1, shard)
    read = Strategy.read({**settings, "shard": shard, "replicate": replicate})
    return read.resolve(shard * replicate, shard * replicate)


@pairwise(FACTORS, possible, gate=8)
def test_the_engine_does_what_is_predicted(case: Chosen, workers: Workers) -> None:
    assert_agrees(workers, MODELS[case["model"]], strategy_of(case), SEQ_LEN)


SETS = (
    "pairwise",
    *(f"pairwise_{one}" for one in ("adapters", "context", "experts", "states", "tensor", "units")),
)


@pytest.mark.parametrize("name", SETS)
def test_every_pair_that_can_occur_is_run_and_most_are_in_the_gate(name: str) -> None:
    module = importlib.import_module(f"tests.distributed.test_{name}")
    factors, possible = module.FACTORS, module.possible
    [mark] = module.test_the_engine_does_what_is_predicted.pytestmark
    cases = [param.values[0] for param in mark.args[1]]
    in_gate = [param.values[0] for param in mark.args[1] if not param.marks]
    held = held_pairs(factors, cases)
    absent = [pair for pair in all_pairs(factors) if pair not in held]
    assert [pair for pair in absent if can_occur(factors, possible, pair)] == []
    assert len(held_pairs(factors, in_gate)) > len(held) / 2


def test_pairs_that_a_strategy_refuses() -> None:
    absent = [pair for pair in all_pairs(FACTORS) if not can_occur(FACTORS, possible, pair)]
    # DDP with hybrid sharding or offload; gathered again where nothing is sharded in forward.
    assert len(absent) == len([1 for kind in ("ddp", "zero1", "zero2") for _ in (True, 2)]) + 2


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FACTORS.items()}))
def test_possible_is_what_a_strategy_accepts(case: Chosen) -> None:
    try:
        strategy_of(case)
    except SpecError:
        assert not possible(case)
    else:
        assert possible(case)


def test_a_covering_set_by_hand() -> None:
    """Three factors of two values: four cases hold all twelve pairs, and no three can."""
    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    assert len(covering(factors, lambda chosen: True)) == 4
    forbidden = covering(factors, lambda chosen: not (chosen.get("a") and chosen.get("b")))
    assert all(not (case["a"] and case["b"]) for case in forbidden)
    assert {(case["a"], case["c"]) for case in forbidden} == {(0, 0), (0, 1), (1, 0), (1, 1)}
