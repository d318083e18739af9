"""Stacked experts on the engine: divided along a dimension that needs no padding, as predicted."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.model import ModelSpec
from shardwise.units.decoder import decoder_units
from tests.distributed.workers import Workers
from tests.gate import first_in_gate, in_gate
from tests.predict.toy import resolve
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.agreement import assert_agrees
from tests.distributed.engine_run import run_case
from tests.distributed.experts_run import gradients, wrapped

FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}
SIZES: dict[str, Any] = {"layers": 3, "hidden": 64, "head_dim": 16, "ffn": 96, "vocab": 503}


def moe(family: str, experts: int) -> ModelSpec:
    return reduced(family, experts=experts, experts_per_token=2, **SIZES)


# 2 and 4 processes would pad 3 experts to 4. 3 would pad 4 to 6, and divide only the last
# dimension of the down projections.
CASES: list[tuple[str, int, int, str, dict[str, Any]]] = [
    ("mixtral", 3, 2, "zero3", {}),
    ("mixtral", 3, 4, "zero3", {"recompute": "full", "param_dtype": "fp32"}),
    ("mixtral", 3, 4, "zero3:2", {"accumulate": 2}),
    ("mixtral", 3, 2, "zero2", {"accumulate": 2, "grad_sync": "last"}),
    ("mixtral", 4, 3, "zero3", {}),
    ("qwen3_moe", 3, 2, "zero3", {"blocks_per_unit": 2}),
    ("qwen3_moe", 3, 4, "zero2", {}),
    # Divided along their rows, with padding: an integer reshard supports nothing else.
    ("mixtral", 3, 4, "zero3", {"reshard_after_forward": 2}),
]


GATE = [CASES[number] for number in (2, 4, 5, 7)]


@pytest.mark.parametrize(
    ("family", "experts", "processes", "kind", "settings"), in_gate(GATE, CASES)
)
def test_experts_run_as_predicted(
    family: str,
    experts: int,
    processes: int,
    kind: str,
    settings: dict[str, Any],
    workers: Workers,
) -> None:
    strategy = resolve(kind, processes, **settings)
    assert_agrees(workers, moe(family, experts), strategy, seq_len=64)


def test_collectives_move_no_padding(workers: Workers) -> None:
    """In bytes counted by hand: 3 experts over 4 processes, in fp32."""
    spec = moe("mixtral", 3)
    strategy = resolve("zero3", 4, param_dtype="fp32")
    case = {
        "model": spec.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "seq_len": 64,
    }
    [ranks] = workers.run(run_case, 4, [case])
    units = decoder_units(spec, 64)
    # 4 rows of the router instead of 3, and 504 of the two tables instead of 503.
    padding = spec.layers * spec.hidden + 2 * spec.hidden
    moved = ranks[0]["collectives"]
    assert moved["reduce_scatter/4/shard"][1] == 4 * (units.numel + padding)


class TestParity:
    """In fp64, against one process: mixed placements change nothing but the order of sums."""

    def run(self, workers: Workers, processes: int, experts: int, **strategy: Any) -> Any:
        model = moe("mixtral", experts).model_dump(mode="json")
        case = {"model": model, "strategy": {**FP64, **strategy}}
        [ranks] = workers.run(gradients, processes, [case])
        return ranks[0]

    @pytest.mark.parametrize(
        ("processes", "experts", "dims", "strategy"),
        first_in_gate(
            1,
            [
                (4, 3, [0, 1], {"kind": "zero3"}),
                (2, 3, [0, 1], {"kind": "zero3"}),
                (4, 3, [0, 1], {"kind": "zero2", "shard": 2}),
                # 4 processes divide 4 experts.
                (4, 4, [0], {"kind": "zero3"}),
            ],
        ),
        ids=str,
    )
    def test_gradients_are_those_of_one_process(
        self,
        processes: int,
        experts: int,
        dims: list[int],
        strategy: dict[str, Any],
        workers: Workers,
    ) -> None:
        alone = self.run(workers, 1, experts, kind="single")
        found = self.run(workers, processes, experts, **strategy)
        assert found["dims"] == dims
        # Made on the meta device: the same weights, to the bit.
        assert found["initial"] == alone["initial"]
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        pairs = zip(found["gradients"], alone["gradients"], strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 1e-12 * max(map(abs, alone["gradients"]))
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-12)
        assert found["clipped"] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("dim", "experts"), [(0, 4), (1, 3)])
def test_models_that_others_sharded_are_read_as_they_are(
    dim: int, experts: int, workers: Workers
) -> None:
    """Along rows, 2 processes hold 4 experts, of which one is padding."""
    [ranks] = workers.run(wrapped, 2, [{"dim": dim}])
    found = ranks[0]
    assert found["counted"] == found["predicted"]
    # Rank 0 holds the most, and is what is predicted.
    assert found["parameter_bytes"] == found["held_bytes"]
    # Two layers: a linear of 7 x 1027 and one of 1027 x 7 with biases, 3 factors, 8 x 7 an expert.
    # Rows are padded to an even number.
    layer = 1028 * 7 + 1028 + 8 * 1027 + 8 + 4 + experts * 8 * 7
    table = 514 * 7
    assert found["held_bytes"] == 4 * (2 * layer + table) / 2
