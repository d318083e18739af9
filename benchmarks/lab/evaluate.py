"""How right predictions are in the lab: calibrated on six cells of the sweep, judged on the others.

Step time and exposed communication of every other cell, the order of strategies at each rate and
batch, what doubling the bandwidth gains, where hybrid sharding overtakes full sharding, and whether
the configuration predicted fastest is.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from benchmarks.lab import sweep
from benchmarks.lab.sweep import BATCHES, RATES, RESULTS, SEQ_LEN, STRATEGIES, Cell, write_cell
from shardwise.calibrate.fit import fit
from shardwise.calibrate.runs import Observation, Parts, units_of
from shardwise.predict.cost import Coefficients
from shardwise.spec.run import read_run

CALIBRATED_ON = [
    Cell(1e9, "ddp", 2),
    Cell(1e9, "zero3", 2),
    Cell(1e9, "hybrid", 8),
    Cell(250e6, "zero2", 8),
    Cell(4e9, "ddp", 8),
    Cell(4e9, "zero3", 8),
]
# Strategies nearer to each other than this are not ranked.
APART = 0.10


def read_cells() -> dict[Cell, Mapping[str, Any]]:
    """What the last sweep measured; measures it where there is none."""
    if not RESULTS.exists():
        sweep.measure()
    cells = json.loads(RESULTS.read_text())["cells"]
    return {Cell(c["rate"], c["strategy"], c["micro_batch"]): c for c in cells}


def observe(cell: Cell, measured: Mapping[str, Any], folder: Path) -> Observation:
    run = read_run(write_cell(cell, folder / f"{cell.name}.toml")).resolved()
    step = float(measured["median_s"])
    exposed = float(measured["exposed_share"]) * step
    return Observation(run, units_of(run), step, step - exposed, exposed)


def predictions() -> tuple[dict[Cell, Observation], dict[Cell, Parts], Coefficients, list[float]]:
    """Of every cell what was measured and what is predicted after calibration."""
    with tempfile.TemporaryDirectory() as place:
        seen = {cell: observe(cell, m, Path(place)) for cell, m in read_cells().items()}
    found = fit([seen[cell] for cell in CALIBRATED_ON], source="six cells of the lab's sweep")
    k = Coefficients(**found.calibration.coefficients())
    predicted = {cell: one.predict(k, one.run.cluster) for cell, one in seen.items()}
    return seen, predicted, k, found.errors


def measure() -> dict[str, Any]:
    seen, predicted, k, fitted_errors = predictions()
    held_out = [cell for cell in seen if cell not in CALIBRATED_ON]
    errors = {c: predicted[c].step_s / seen[c].step_s - 1 for c in held_out}
    sizes = sorted(abs(error) for error in errors.values())
    exposed = {
        c: predicted[c].exposed_s / predicted[c].step_s - (seen[c].exposed_s or 0) / seen[c].step_s
        for c in held_out
    }
    right, pairs, wrong = _ranking(seen, predicted)
    doubling = _doubling(seen, predicted)
    return {
        "held_out": len(held_out),
        "step_median_error": statistics.median(sizes),
        "step_p90_error": sizes[round(0.9 * (len(sizes) - 1))],
        "exposed_median_error": statistics.median(abs(e) for e in exposed.values()),
        "exposed_largest_error": max(abs(e) for e in exposed.values()),
        "ranking_right": right / pairs if pairs else None,
        "ranking_pairs": pairs,
        "ranking_wrong": wrong,
        "doubling_error_pp": 100 * max(abs(p - m) for p, m in doubling.values()),
        "doubling_median_error_pp": 100 * statistics.median(
            abs(p - m) for p, m in doubling.values()
        ),
        "doubling": {
            name: {"predicted": p, "measured": m} for name, (p, m) in doubling.items()
        },
        **_crossover(seen, predicted),
        "top1_regret": max(_regret(seen, predicted).values()),
        "regret_by_rate": _regret(seen, predicted),
        "fitted_errors": fitted_errors,
        "coefficients": k._asdict(),
        "cells": [
            {
                **cell._asdict(),
                "measured_s": seen[cell].step_s,
                "predicted_s": predicted[cell].step_s,
                "error": predicted[cell].step_s / seen[cell].step_s - 1,
                "measured_exposed": (seen[cell].exposed_s or 0) / seen[cell].step_s,
                "predicted_exposed": predicted[cell].exposed_s / predicted[cell].step_s,
                "calibrated_on": cell in CALIBRATED_ON,
            }
            for cell in seen
        ],
    }  # fmt: skip


def _ranking(
    seen: dict[Cell, Observation], predicted: dict[Cell, Parts]
) -> tuple[int, int, list[str]]:
    right = pairs = 0
    wrong = []
    for rate in RATES:
        for batch in BATCHES:
            for one, other in combinations(STRATEGIES, 2):
                a, b = Cell(rate, one, batch), Cell(rate, other, batch)
                ratio = seen[a].step_s / seen[b].step_s
                if abs(math.log(ratio)) <= math.log(1 + APART):
                    continue
                pairs += 1
                agrees = (ratio > 1) == (predicted[a].step_s > predicted[b].step_s)
                right += agrees
                if not agrees:
                    wrong.append(f"{a.name} against {b.name}")
    return right, pairs, wrong


def _doubling(
    seen: dict[Cell, Observation], predicted: dict[Cell, Parts]
) -> dict[str, tuple[float, float]]:
    """Efficiency, the share of a step that waits for nobody, gained by twice the rate."""
    found = {}
    for name in STRATEGIES:
        for batch in BATCHES:
            for slow, fast in pairwise(RATES):
                a, b = Cell(slow, name, batch), Cell(fast, name, batch)
                mine = _efficiency(predicted[b]) - _efficiency(predicted[a])
                real = _efficiency(_parts(seen[b])) - _efficiency(_parts(seen[a]))
                found[f"{a.name} doubled"] = (mine, real)
    return found


def _parts(one: Observation) -> Parts:
    return Parts(one.step_s, one.compute_s or 0.0, one.exposed_s or 0.0)


def _efficiency(parts: Parts) -> float:
    return 1 - parts.exposed_s / parts.step_s


def _crossover(seen: dict[Cell, Observation], predicted: dict[Cell, Parts]) -> dict[str, Any]:
    """The rate at which full sharding is as fast as hybrid, by batch; none where it never is."""
    found: dict[str, Any] = {}
    factors = []
    for batch in BATCHES:

        def ratio(steps: Mapping[Cell, Any], rate: float, size: int = batch) -> float:
            return float(
                steps[Cell(rate, "zero3", size)].step_s / steps[Cell(rate, "hybrid", size)].step_s
            )  # fmt: skip

        mine = _crosses([ratio(predicted, rate) for rate in RATES])
        real = _crosses([ratio(seen, rate) for rate in RATES])
        found[f"crossover_batch_{batch}"] = {"predicted": mine, "measured": real}
        if mine and real:
            factors.append(max(mine / real, real / mine))
    found["crossover_factor"] = max(factors) if factors else None
    return found


def _crosses(ratios: list[float]) -> float | None:
    for (slow, before), (fast, after) in pairwise(zip(RATES, ratios, strict=True)):
        if (before - 1) * (after - 1) < 0:
            share = math.log(before) / (math.log(before) - math.log(after))
            return slow * (fast / slow) ** share
    return None


def _regret(seen: dict[Cell, Observation], predicted: dict[Cell, Parts]) -> dict[str, float]:
    """How much slower the configuration predicted fastest is than the best measured one."""
    found = {}
    for rate in RATES:
        cells = [Cell(rate, name, batch) for name in STRATEGIES for batch in BATCHES]

        def tokens(cell: Cell, steps: Mapping[Cell, Any]) -> float:
            return cell.micro_batch * SEQ_LEN / float(steps[cell].step_s)

        chosen = max(cells, key=lambda cell: tokens(cell, predicted))
        best = max(tokens(cell, seen) for cell in cells)
        found[f"{rate / 1e6:.0f} Mbit/s"] = best / tokens(chosen, seen) - 1
    return found


def show(result: Mapping[str, Any]) -> None:
    print(
        f"{result['held_out']} cells held out, calibrated on {len(CALIBRATED_ON)}: step time off "
        f"by {result['step_median_error']:.1%} in the middle, {result['step_p90_error']:.1%} at "
        "the 90th percentile"
    )
    print(
        f"exposed communication off by {result['exposed_median_error']:.1%} of the step in the "
        f"middle, {result['exposed_largest_error']:.1%} at most"
    )
    print(
        f"{result['ranking_right']:.1%} of {result['ranking_pairs']} pairs of strategies that "
        f"differ by more than {APART:.0%} ranked right"
    )
    print(
        f"gain in efficiency by doubling the rate off by {result['doubling_median_error_pp']:.1f} "
        f"points in the middle, {result['doubling_error_pp']:.1f} at most"
    )
    factor = result["crossover_factor"]
    print(
        f"crossover of hybrid and full sharding: {f'a factor of {factor:.2f}' if factor else '-'}"
    )
    print(f"the fastest predicted is at most {result['top1_regret']:.1%} slower than the best")
    for cell in result["cells"]:
        mark = "fitted" if cell["calibrated_on"] else ""
        print(
            f"  {Cell(cell['rate'], cell['strategy'], cell['micro_batch']).name:22}"
            f"{cell['predicted_s'] * 1e3:8.0f} ms{cell['measured_s'] * 1e3:8.0f} ms"
            f"{cell['error']:+8.1%}   exposed {cell['predicted_exposed']:.0%} "
            f"{cell['measured_exposed']:.0%} {mark}"
        )
