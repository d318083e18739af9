"""The recorded cells of sharding with tensor parallelism: comparable, and predicted well."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
from benchmarks.lab import tensor, tensor_results
from benchmarks.lab.cases import load


def test_cells_train_the_same_sequences_and_place_tensor_groups_as_named() -> None:
    for cell in tensor.CELLS:
        strategy = cell.case.run().strategy
        assert strategy.micro_batch * strategy.mesh.data_parallel == cell.batch
        if strategy.tensor > 1:
            across = cell.layout == tensor.ACROSS
            assert strategy.stride("tensor") == (2 if across else 1)
    assert len(set(tensor.CALIBRATED_ON)) == 6
    assert len(tensor.CELLS) - len(tensor.CALIBRATED_ON) >= 24


@pytest.mark.skipif(load(tensor.NAME) is None, reason="not recorded")
def test_recorded_cells_are_predicted() -> None:
    result = tensor_results.evaluate()
    assert result["step_median_error"] <= 0.08
    assert result["ranking_right"] >= 0.9
    assert result["top1_regret"] <= 0.05
    ratios = result["across"].values()
    assert all(one["measured"] > 1 and one["predicted"] > 1 for one in ratios)
