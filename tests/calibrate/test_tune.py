"""Tuning: few probes find the best of what the lab measured, and broken ones are results."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
from benchmarks.lab.cases import CLUSTER
from benchmarks.lab.sweep import RATES, Cell, read_cells
from shardwise.observe.observation import Observation
from shardwise.trials.calibrate.tune import Candidate, tune
from tests.calibrate.known import observed

measured = pytest.mark.skipif(
    read_cells() is None or not CLUSTER.exists(), reason="needs a measured sweep of the lab"
)


@pytest.fixture(scope="module")
def sweep() -> dict[Cell, Observation]:
    return {cell: cell.case.observe(found) for cell, found in (read_cells() or {}).items()}


@measured
@pytest.mark.parametrize("rate", RATES)
def test_few_probes_find_the_best_of_what_the_lab_measured(
    sweep: dict[Cell, Observation], rate: float
) -> None:
    cells = [cell for cell in sweep if cell.rate == rate]
    candidates = [Candidate(cell.name, sweep[cell].run) for cell in cells]
    steps = {cell.name: sweep[cell].step_s for cell in cells}
    tuned = tune(candidates, lambda one: steps[one.name], most=5)
    best = max(one.tokens / steps[one.name] for one in candidates)
    assert tuned.best is not None
    assert tuned.best.tokens_per_s is not None
    assert tuned.best.tokens_per_s >= best / 1.03
    assert len(tuned.probes) <= 5


def candidates_of(*cells: tuple[str, int]) -> dict[str, Candidate]:
    found = {}
    for kind, batch in cells:
        name = f"{kind} x{batch}"
        found[name] = Candidate(name, observed(kind, batch).run)
    return found


def test_what_breaks_is_out_and_the_rest_goes_on() -> None:
    cells = [("ddp", 1), ("ddp", 4), ("zero3", 4)]
    named = candidates_of(*cells)
    steps = {f"{kind} x{batch}": observed(kind, batch).step_s for kind, batch in cells}

    def run(one: Candidate) -> float | str:
        return "out of memory" if one.name == "ddp x4" else steps[one.name]

    tuned = tune(list(named.values()), run, most=5)
    assert tuned.best is not None
    assert tuned.best.candidate.name == "zero3 x4"
    assert [probe.failure for probe in tuned.probes if probe.failure] == ["out of memory"]
    broken = tune(list(named.values()), lambda _: "broken", most=2)
    assert broken.best is None
    assert len(broken.probes) == 2
    assert broken.stopped == "limit reached"


def test_tokens_of_all_ranks_and_micro_batches_count() -> None:
    run = observed("zero3", 4).run
    accumulated = run._replace(strategy=run.strategy.but(accumulate=3))
    # Four ranks of four sequences of 128 tokens.
    assert Candidate("x", run).tokens == 4 * 4 * 128
    assert Candidate("x", accumulated).tokens == 3 * 4 * 4 * 128
