"""The cells of sharding with expert parallelism: comparable, and predicted well where recorded."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
from benchmarks.lab import expert, layouts_results
from benchmarks.lab.cases import RANKS_PER_HOST, load

SWEEP = expert.EXPERT


def test_cells_train_the_same_sequences_and_place_expert_groups_as_named() -> None:
    for cell in SWEEP.cells:
        run = SWEEP.case(cell).run()
        strategy = run.strategy
        assert strategy.micro_batch * strategy.mesh.data_parallel == cell.batch
        # Neighbours form an expert group, so a larger one than a host spans both.
        assert ("across" in cell.layout) == (strategy.expert > RANKS_PER_HOST)
        assert ("experts" in cell.layout) == (strategy.expert > 1)
        assert run.train is not None
        assert run.train.balance_loss == "global"
    assert set(SWEEP.fitted) < set(SWEEP.cells)
    assert len(SWEEP.held_out) >= 16


@pytest.mark.skipif(load(SWEEP.name) is None, reason="not recorded")
def test_recorded_cells_are_predicted_before_any_is_trained() -> None:
    """From `shardwise calibrate` alone; the fit on six cells is judged by the lab itself."""
    steps = {cell: one.step_s for cell, one in SWEEP.observations(SWEEP.cells).items()}
    predicted = SWEEP.predict(SWEEP.calibrated(), SWEEP.cells)
    found = layouts_results.accuracy(SWEEP, predicted, steps)
    assert found["step_median_error"] <= 0.15
    assert found["ranking_right"] >= 0.9
