"""Every strategy trains the same model: parameters after six steps against one process, in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.gate import in_gate
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.parity_run import train

SPEC = reduced("llama", layers=3, hidden=64, heads=4, head_dim=16, ffn=96, vocab=101, tied=True)
FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}
CLIPS = (0.0, 0.5)
ACCUMULATIONS = (1, 2)
TWO: list[dict[str, Any]] = [{"kind": kind} for kind in ("ddp", "zero1", "zero2", "zero3")]
TWO += [{"kind": "zero3", "recompute": policy} for policy in ("full", "selective", 0.5)]
FOUR: list[dict[str, Any]] = [
    {"kind": "zero3", "shard": 2},
    {"kind": "zero3", "reshard_after_forward": 2},
    {"kind": "zero3", "prefetch": 0},
    {"kind": "zero3", "prefetch": 2, "blocks_per_unit": 2},
]


CASES = [
    (processes, strategy, clip, accumulate)
    for processes, strategies in ((2, TWO), (4, FOUR))
    for strategy, clip, accumulate in itertools.product(strategies, CLIPS, ACCUMULATIONS)
]
# Each strategy once, where most can go wrong; and what all others are compared with.
GATE = [case for case in CASES if case[2:] == (0.5, 2)] + [(2, {"kind": "zero3"}, 0.0, 1)]


def trained(workers: Workers, processes: int, clip: float, **strategy: Any) -> list[float]:
    """All parameters after training, as rank 0 sees them."""
    case = {
        "model": SPEC.model_dump(mode="json"),
        "strategy": {**FP64, **strategy},
        "clip": clip,
    }
    [ranks] = workers.run(train, processes, [case])
    found: list[float] = ranks[0]
    return found


@pytest.fixture(scope="module")
def alone(workers: Workers) -> dict[float, list[float]]:
    """The same training on one process, by what gradients are clipped to."""
    return {clip: trained(workers, 1, clip, kind="single") for clip in CLIPS}


@pytest.fixture(scope="module")
def sums_in_one_order() -> dict[tuple[int, float, int], list[float]]:
    """By processes, clipping and accumulation: what the first strategy that sums in this order got.

    DDP and zero1 sum micro-batches before they reduce, and hybrid sharding reduces in two steps:
    the same sum in another order. All other strategies agree to the bit.
    """
    return {}


@pytest.mark.parametrize(
    ("processes", "strategy", "clip", "accumulate"), in_gate(GATE, CASES), ids=str
)
def test_processes_train_what_one_does(
    processes: int,
    strategy: dict[str, Any],
    clip: float,
    accumulate: int,
    workers: Workers,
    alone: dict[float, list[float]],
    sums_in_one_order: dict[tuple[int, float, int], list[float]],
) -> None:
    found = trained(workers, processes, clip, **strategy, accumulate=accumulate)
    assert len(found) == len(alone[clip]) > 0
    assert max(abs(a - b) for a, b in zip(found, alone[clip], strict=True)) <= 1e-12
    if strategy["kind"] in ("zero2", "zero3") and "shard" not in strategy:
        assert found == sums_in_one_order.setdefault((processes, clip, accumulate), found)
