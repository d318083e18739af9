"""Plans of mixtures beside published layouts."""

from __future__ import annotations

from benchmarks.expert_plans import read_runs, search
from benchmarks.experts import PAGE


def test_the_page_has_a_row_for_every_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for run in read_runs():
        assert f"]({run['url']} " in page
        assert f"| {run['layout']} |" in page
        assert run["why"] in page


def test_experts_have_to_be_divided_where_states_do_not_fit() -> None:
    """235 B parameters on 64 devices of 80 GB: only with experts over several, as published."""
    run = next(run for run in read_runs() if run["cluster"] == "8x8xH100-SXM@400Gbps")
    assert search(run, 1).best is None
    found = search(run).best
    assert found is not None
    assert found.strategy.expert > 1
