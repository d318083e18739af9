"""Uneven routing: the rank that gets the most tokens, and its peak, are those predicted."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import predict_memory
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.division import Division
from tests.distributed.test_pairwise_experts import SEQ_LEN, SIZES
from tests.distributed.workers import Workers
from tests.gate import first_in_gate
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.skewed_run import run_case

PEAK_TOLERANCE = 0.05
# Processes, settings, which rank of an expert group gets the most, and its tokens over the mean.
CASES: list[tuple[int, dict[str, Any], int, float]] = [
    (2, {"expert": 2, "micro_batch": 4}, 1, 1.5),
    (4, {"expert": 4, "micro_batch": 3}, 2, 1.75),
    (4, {"expert": 2, "kind": "zero1", "accumulate": 2}, 0, 1.75),
    (4, {"expert": 4, "recompute": "full", "micro_batch": 2}, 3, 2.5),
    (4, {"expert": 2, "kind": "zero2", "replicate": 2, "micro_batch": 3}, 1, 1.5),
    (2, {"expert": 2, "recompute": "selective", "micro_batch": 3}, 0, 1.25),
    (4, {"expert": 4, "loss": "chunked", "blocks_per_unit": 2, "micro_batch": 2}, 0, 1.75),
]


@pytest.mark.parametrize(("processes", "settings", "busiest", "load"), first_in_gate(1, CASES))
def test_the_busiest_rank_is_named_and_its_peak_predicted(
    processes: int, settings: dict[str, Any], busiest: int, load: float, workers: Workers
) -> None:
    strategy = Strategy.read({"kind": "zero3", **settings}).resolve(processes, processes)
    model = reduced("mixtral", experts=8, experts_per_token=2, **SIZES)
    case = {
        "model": model.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "seq_len": SEQ_LEN,
        "busiest": busiest,
        "load": load,
    }
    [ranks] = workers.run(run_case, processes, [case])
    measured = ranks[0]["metrics"]
    assert (measured["rank_load"], measured["busiest_rank"]) == (load, busiest)
    most = [rank["peak_bytes"] for rank in ranks if rank["number"] == busiest]
    others = [rank["peak_bytes"] for rank in ranks if rank["number"] != busiest]
    assert min(most) > max(others)
    division = Division.of(strategy, measured["rank_load"])
    units = decoder_units(model, SEQ_LEN, strategy.param_dtype, division=division)
    columns = Configurations.of([strategy])
    grouped = units.grouped(strategy.blocks_per_unit)
    predicted = float(predict_memory(grouped, columns).peak_bytes[0])
    assert max(most) == pytest.approx(predicted, rel=PEAK_TOLERANCE)
