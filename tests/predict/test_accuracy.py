"""What ships meets its promises on published runs that no coefficient has seen."""

from __future__ import annotations

from benchmarks import memory
from benchmarks.accuracy import judged_as_shipped


def test_time_of_held_out_runs() -> None:
    found = judged_as_shipped()
    assert found["rows"] >= 180
    assert found["median_error"] <= 0.06
    assert found["mean_error"] <= 0.09
    assert found["p90_error"] <= 0.18
    assert found["coverage90"] >= 0.88


def test_memory_of_held_out_runs() -> None:
    found = memory.study(columns_only=False)
    assert found["rows"] >= 35
    assert found["median_error"] <= 0.05
    assert found["refused"] == []
    assert found["at_risk"] <= 0.05 * found["ran"]
    # Of what failed, only configurations that the same source lists as having run are missed.
    assert found["missed"] == found["missed_that_also_ran"]
    assert found["did_not_fit_caught"] >= 0.85
