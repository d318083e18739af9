"""The whole loop in a few minutes: measure the hosts, train a little, predict the rest."""

from __future__ import annotations

import statistics
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("scipy")
from benchmarks.lab import machine, network
from benchmarks.lab.cases import STRATEGIES, Case, measure_cases
from benchmarks.lab.quiet import why_not_judged
from shardwise.predict.rates import Coefficients
from shardwise.spec.lookup import find_cluster
from shardwise.trials.calibrate.fit import fit

# As long jobs wait, in all, until others use little of the machine.
PATIENCE_S = 300.0
REASON = network.available()
pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]


def test_what_was_never_trained_is_predicted(tmp_path: Path) -> None:
    cases = [
        Case(
            f"{rate / 1e6:.0f}-{name}",
            rate,
            {**STRATEGIES[name], "micro_batch": 2},
            plain=3,
            rounds=1,
        )
        for rate in (500e6, 2e9)
        for name in ("ddp", "zero3", "hybrid")
    ]
    machine.measure(tmp_path / "cluster.toml")
    cluster = find_cluster(str(tmp_path / "cluster.toml"))
    # A line through large all-gathers has the rate that the link was set to, or what Gloo makes of
    # it; docs/lab.md has every collective at every rate.
    assert cluster.calibration is not None
    assert 0.7 < cluster.calibration.network_efficiency < 1.15
    kept = measure_cases(cases, patience_s=PATIENCE_S)
    others = max(share for one in kept.values() for share in one.others)
    if (reason := why_not_judged(others)) is not None:
        pytest.skip(reason)
    seen = {case.name: case.observe(kept[case.name].summary(), cluster) for case in cases}
    found = fit([seen["500-zero3"], seen["2000-ddp"]])
    k = Coefficients(**found.calibration.coefficients())
    steps = {name: one.predict(k, one.run.cluster).step_s for name, one in seen.items()}
    held_out = [name for name in steps if name not in ("500-zero3", "2000-ddp")]
    errors = [abs(steps[name] / seen[name].step_s - 1) for name in held_out]
    assert statistics.median(errors) < 0.25, errors
    for one, other in combinations(("ddp", "zero3", "hybrid"), 2):
        for rate in (500, 2000):
            real = seen[f"{rate}-{one}"].step_s / seen[f"{rate}-{other}"].step_s
            if not 1 / 1.4 < real < 1.4:
                mine = steps[f"{rate}-{one}"] / steps[f"{rate}-{other}"]
                assert (mine > 1) == (real > 1), (rate, one, other)
