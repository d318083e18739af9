"""Accuracy of predictions in the lab: calibrated on six cells of the sweep, tested on the others.

Tested: step time and exposed communication of the other cells, the ranking of strategies at each
rate and batch, the gain from twice the bandwidth, the rate at which hybrid sharding overtakes full
sharding, and whether the configuration predicted fastest is the fastest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from benchmarks.lab.calibrated import CALIBRATED_ON, calibrate, measured_alone
from benchmarks.lab.cases import SEQ_LEN, STRATEGIES, load
from benchmarks.lab.experiments import CROSSING, QUESTIONS, predict
from benchmarks.lab.quiet import why_not_judged
from benchmarks.lab.sweep import BATCHES, RATES, Cell, read_cells
from shardwise.observe.observation import Observation, StepSeconds
from shardwise.predict.rates import Coefficients

# Strategies whose step times differ by less are not ranked.
APART = 0.10


def measure() -> dict[str, Any]:
    seen, found = calibrate()
    k = Coefficients(**found.calibration.coefficients())
    predicted = {cell: one.predict(k, one.run.cluster) for cell, one in seen.items()}
    others = {cell: one.get("others_share", 0.0) for cell, one in (read_cells() or {}).items()}
    not_judged = {c: why for c, share in others.items() if (why := why_not_judged(share))}
    held_out = [cell for cell in seen if cell not in CALIBRATED_ON and cell not in not_judged]
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
        "not_judged": {cell.name: why for cell, why in not_judged.items()},
        "step_median_error": statistics.median(sizes),
        "step_p90_error": sizes[round(0.9 * (len(sizes) - 1))],
        "exposed_median_error": statistics.median(abs(e) for e in exposed.values()),
        "exposed_largest_error": max(abs(e) for e in exposed.values()),
        "exposed_within_8pp": sum(abs(e) <= 0.08 for e in exposed.values()),
        "ranking_right": right / pairs if pairs else None,
        "ranking_pairs": pairs,
        "ranking_wrong": wrong,
        "doubling_error_pp": 100 * max(abs(p - m) for p, m in doubling.values()),
        "doubling_median_error_pp": 100 * statistics.median(
            abs(p - m) for p, m in doubling.values()
        ),
        "doubling_within_3pp": sum(abs(p - m) <= 0.03 for p, m in doubling.values()),
        "doubling_by_rate": _by_rate(doubling),
        "doubling": {
            name: {"predicted": p, "measured": m} for name, (p, m) in doubling.items()
        },
        **_crossover(k),
        "top1_regret": max(_regret(seen, predicted).values()),
        "regret_by_rate": _regret(seen, predicted),
        **_chosen(),
        **_without_training(seen, held_out),
        "fitted_errors": found.errors,
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
    seen: dict[Cell, Observation], predicted: dict[Cell, StepSeconds]
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
    seen: dict[Cell, Observation], predicted: dict[Cell, StepSeconds]
) -> dict[str, tuple[float, float]]:
    """Efficiency gained by twice the rate, predicted and measured.

    Efficiency is the compute time of a step over its total time.
    """
    found = {}
    for name in STRATEGIES:
        for batch in BATCHES:
            for slow, fast in pairwise(RATES):
                a, b = Cell(slow, name, batch), Cell(fast, name, batch)
                alone = predicted[b].compute_s
                mine = alone / predicted[b].step_s - alone / predicted[a].step_s
                real = alone / seen[b].step_s - alone / seen[a].step_s
                found[f"{a.name} doubled"] = (mine, real)
    return found


def _by_rate(doubling: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Mean gain over all strategies and batches, from each rate to twice the rate."""
    found = {}
    for rate in RATES[:-1]:
        mine = [both for name, both in doubling.items() if name.startswith(f"{rate / 1e6:.0f}Mbit")]
        predicted, measured = (statistics.mean(column) for column in zip(*mine, strict=True))
        found[f"{rate / 1e6:.0f} Mbit/s"] = {"predicted": predicted, "measured": measured}
    return found


def _crossover(k: Coefficients) -> dict[str, Any]:
    """The rate below which hybrid sharding with recompute beats full sharding without it."""
    measured = load("crossover")
    if measured is None:
        return {"crossover_factor": None}
    cases = {case.name: case for case in QUESTIONS["crossover"].cases}
    real = {name: float(found["median_s"]) for name, found in measured["cases"].items()}
    mine = {name: predict(case, k).step_s for name, case in cases.items()}
    a, b = _crosses(mine), _crosses(real)
    return {
        "crossover": {"predicted": a, "measured": b},
        "crossover_factor": max(a / b, b / a) if a and b else None,
    }


def _crosses(steps: Mapping[str, float]) -> float | None:
    """The rate at which the fitted ratio of full to hybrid step time is one."""
    rates = np.log(CROSSING)
    ratios = np.log([steps[f"{r / 1e6:.0f}Mbit full"] / steps[f"{r / 1e6:.0f}Mbit hybrid"]
                     for r in CROSSING])  # fmt: skip
    slope, level = np.polyfit(rates, ratios, 1)
    crossing = math.exp(-level / slope)
    return crossing if CROSSING[0] <= crossing <= CROSSING[-1] else None


def _regret(seen: dict[Cell, Observation], predicted: dict[Cell, StepSeconds]) -> dict[str, float]:
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


def _chosen() -> dict[str, Any]:
    """Regret of `plan` and `tune` against the best cell, if they were run."""
    found: dict[str, Any] = {}
    if (planned := load("plan")) is not None:
        found["plan_regret"] = planned["top1_regret"]
    if (tuned := load("tune")) is not None:
        found |= {name: tuned[name] for name in ("tune_regret", "most_probes")}
    return found


def _without_training(seen: dict[Cell, Observation], cells: list[Cell]) -> dict[str, float]:
    """Errors on the same cells with `shardwise calibrate` alone: matmuls, memory and links."""
    k = measured_alone()
    steps = [seen[c].predict(k, seen[c].run.cluster).step_s / seen[c].step_s for c in cells]
    sizes = sorted(abs(step - 1) for step in steps)
    return {
        "untrained_median_error": statistics.median(sizes),
        "untrained_p90_error": sizes[round(0.9 * (len(sizes) - 1))],
    }


def show(result: Mapping[str, Any]) -> None:
    print(
        f"{result['held_out']} cells held out, calibrated on {len(CALIBRATED_ON)}: error of step "
        f"time {result['step_median_error']:.1%} (median), {result['step_p90_error']:.1%} (90th "
        "percentile)"
    )
    for name, why in result["not_judged"].items():
        print(f"{name}: {why}")
    print(
        f"without training runs, from matmuls, memory and links only: "
        f"{result['untrained_median_error']:.1%} and {result['untrained_p90_error']:.1%}"
    )
    print(
        f"error of exposed communication, share of the step: "
        f"{result['exposed_median_error']:.1%} (median), {result['exposed_largest_error']:.1%} "
        f"(largest); {result['exposed_within_8pp']} of {result['held_out']} within 8 %"
    )
    print(
        f"{result['ranking_right']:.1%} of {result['ranking_pairs']} pairs of strategies that "
        f"differ by more than {APART:.0%} ranked correctly"
    )
    print(
        f"error of the efficiency gain from twice the rate: "
        f"{result['doubling_median_error_pp']:.1f} points (median), "
        f"{result['doubling_error_pp']:.1f} (largest)"
    )
    for rate, gain in result["doubling_by_rate"].items():
        print(
            f"  from {rate}, mean of all: {gain['predicted']:.1%} predicted, "
            f"{gain['measured']:.1%} measured"
        )
    factor = result["crossover_factor"]
    print(
        f"crossover of hybrid and full sharding: {f'a factor of {factor:.2f}' if factor else '-'}"
    )
    print(f"the predicted fastest is at most {result['top1_regret']:.1%} slower than the best")
    if "plan_regret" in result:
        print(
            f"the choice of plan is at most {result['plan_regret']:.1%} slower than the best cell"
        )
    if "tune_regret" in result:
        print(
            f"the choice of tune after at most {result['most_probes']} probes is at most "
            f"{result['tune_regret']:.1%} slower"
        )
    for cell in result["cells"]:
        mark = "fitted" if cell["calibrated_on"] else ""
        print(
            f"  {Cell(cell['rate'], cell['strategy'], cell['micro_batch']).name:22}"
            f"{cell['predicted_s'] * 1e3:8.0f} ms{cell['measured_s'] * 1e3:8.0f} ms"
            f"{cell['error']:+8.1%}   exposed {cell['predicted_exposed']:.0%} "
            f"{cell['measured_exposed']:.0%} {mark}"
        )
