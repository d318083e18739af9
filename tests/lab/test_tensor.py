"""The recorded cells of sharding with tensor parallelism: comparable, and predicted well."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
from benchmarks.lab import tensor
from benchmarks.lab.cases import load


def test_cells_train_the_same_sequences_and_place_tensor_groups_as_named() -> None:
    for cell in tensor.TENSOR.cells:
        strategy = tensor.TENSOR.case(cell).run().strategy
        assert strategy.micro_batch * strategy.mesh.data_parallel == cell.batch
        if strategy.tensor > 1:
            across = cell.layout == tensor.ACROSS
            assert strategy.stride("tensor") == (2 if across else 1)
    assert len(set(tensor.TENSOR.fitted)) == 6
    assert len(tensor.TENSOR.held_out) >= 24


@pytest.mark.skipif(load(tensor.TENSOR.name) is None, reason="not recorded")
def test_recorded_cells_are_predicted() -> None:
    result = tensor.evaluate()
    assert result["step_median_error"] <= 0.08
    assert result["ranking_right"] >= 0.9
    assert result["top1_regret"] <= 0.05
    ratios = result["across"].values()
    assert all(one["measured"] > 1 and one["predicted"] > 1 for one in ratios)
