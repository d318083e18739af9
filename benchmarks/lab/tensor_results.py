"""Accuracy of predictions for the tensor cells: calibrated on six of them, tested on the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.lab.tensor import (
    ACROSS,
    BATCHES,
    CALIBRATED_ON,
    CELLS,
    CLUSTER,
    INSIDE,
    LAYOUTS,
    RATES,
    Cell,
    observations,
)
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.rates import Coefficients
from shardwise.spec.lookup import find_cluster
from shardwise.trials.calibrate.fit import fit

HERE = Path(__file__).parent
# Layouts whose step times differ by less are not ranked.
APART = 0.10


def evaluate() -> dict[str, Any]:
    """Errors, rankings and regret of predictions for the cells that were not fitted."""
    seen = observations()
    source = "six cells of the lab's tensor sweep"
    found = fit([seen[cell] for cell in CALIBRATED_ON], source=source)
    k = Coefficients(**found.calibration.coefficients())
    alone = coefficients_for(find_cluster(str(CLUSTER)))
    assert alone is not None
    steps = {cell: one.step_s for cell, one in seen.items()}
    predicted = {cell: one.predict(k, one.run.cluster).step_s for cell, one in seen.items()}
    untrained = {cell: one.predict(alone, one.run.cluster).step_s for cell, one in seen.items()}
    errors, first = _errors(predicted, steps), _errors(untrained, steps)
    pairs = list(_pairs(steps, predicted))
    groups = [(rate, batch) for rate in RATES for batch in BATCHES]
    return {
        "cells": len(CELLS),
        "held_out": len(errors),
        "step_median_error": statistics.median(errors),
        "step_p90_error": errors[round(0.9 * (len(errors) - 1))],
        "untrained_median_error": statistics.median(first),
        "ranking_right": sum(right for _, right in pairs) / len(pairs),
        "ranking_pairs": len(pairs),
        "ranking_wrong": [name for name, right in pairs if not right],
        "top1_regret": max(_regret(*group, steps, predicted) for group in groups),
        # Step time with tensor groups across hosts, relative to inside.
        "across": {
            f"{rate / 1e6:.0f} Mbit/s, {batch}": {
                "predicted": _across(rate, batch, predicted),
                "measured": _across(rate, batch, steps),
            }
            for rate, batch in groups
        },
        "fitted_errors": found.errors,
        "coefficients": k._asdict(),
        "rows": [
            {**cell._asdict(), "measured_s": steps[cell], "predicted_s": predicted[cell],
             "error": predicted[cell] / steps[cell] - 1, "calibrated_on": cell in CALIBRATED_ON}
            for cell in CELLS
        ],
    }  # fmt: skip


Steps = Mapping[Cell, float]


def _errors(predicted: Steps, measured: Steps) -> list[float]:
    """Of the cells that were not fitted, smallest first."""
    held_out = [cell for cell in CELLS if cell not in CALIBRATED_ON]
    return sorted(abs(predicted[cell] / measured[cell] - 1) for cell in held_out)


def _pairs(measured: Steps, predicted: Steps) -> Iterator[tuple[str, bool]]:
    """Pairs of layouts that differ enough, and whether they are ranked correctly."""
    for rate in RATES:
        for batch in BATCHES:
            for one, other in combinations(LAYOUTS, 2):
                a, b = Cell(rate, one, batch), Cell(rate, other, batch)
                if abs(math.log(measured[a] / measured[b])) > math.log(1 + APART):
                    right = (measured[a] > measured[b]) == (predicted[a] > predicted[b])
                    yield f"{a.name} against {b.name}", right


def _regret(rate: float, batch: int, measured: Steps, predicted: Steps) -> float:
    """How much slower the layout predicted fastest is than the fastest."""
    cells = [Cell(rate, layout, batch) for layout in LAYOUTS]
    chosen = min(cells, key=lambda cell: predicted[cell])
    return measured[chosen] / min(measured[cell] for cell in cells) - 1


def _across(rate: float, batch: int, steps: Steps) -> float:
    return steps[Cell(rate, ACROSS, batch)] / steps[Cell(rate, INSIDE, batch)]


def show(result: Mapping[str, Any]) -> None:
    print(
        f"{result['cells']} cells, {result['held_out']} held out: error of step time "
        f"{result['step_median_error']:.1%} (median), {result['step_p90_error']:.1%} (90th "
        f"percentile); {result['untrained_median_error']:.1%} without training runs"
    )
    print(
        f"{result['ranking_right']:.1%} of {result['ranking_pairs']} pairs of layouts that differ "
        f"by more than {APART:.0%} ranked correctly"
    )
    print(f"the predicted fastest is at most {result['top1_regret']:.1%} slower than the best")
    for where, ratio in result["across"].items():
        print(
            f"  {where} sequences: tensor across hosts takes {ratio['predicted']:.2f} times the "
            f"step of inside (predicted), {ratio['measured']:.2f} (measured)"
        )
    for row in result["rows"]:
        name = Cell(row["rate"], row["layout"], row["batch"]).name
        print(
            f"  {name:34}{row['predicted_s'] * 1e3:8.0f} ms{row['measured_s'] * 1e3:8.0f} ms"
            f"{row['error']:+8.1%} {'fitted' if row['calibrated_on'] else ''}"
        )


def section(result: Mapping[str, Any]) -> str:
    """The page's section on tensor parallelism."""
    rows = []
    for rate in RATES:
        for batch in BATCHES:
            mine = {
                r["layout"]: r for r in result["rows"] if (r["rate"], r["batch"]) == (rate, batch)
            }
            cells = [
                f"{mine[layout]['measured_s'] * 1e3:.0f} ({mine[layout]['predicted_s'] * 1e3:.0f})"
                for layout in LAYOUTS
            ]
            rows.append(f"| {rate / 1e6:,.0f} Mbit/s | {batch} | {' | '.join(cells)} |")
    ratios = list(result["across"].values())
    words = {name: value for name, value in result.items() if isinstance(value, (int, float))}
    return (
        (HERE / "tensor.md")
        .read_text()
        .strip()
        .format(
            **words,
            head=" | ".join(LAYOUTS),
            lines="|".join("---" for _ in range(len(LAYOUTS) + 2)),
            rows="\n".join(rows),
            calibrated=len(CALIBRATED_ON),
            losses=sum(ratio["measured"] > 1 for ratio in ratios),
            predicted_losses=sum(ratio["predicted"] > 1 for ratio in ratios),
            ratios=len(ratios),
            most=max(ratio["measured"] for ratio in ratios),
            most_predicted=max(ratio["predicted"] for ratio in ratios),
            wrong=", ".join(result["ranking_wrong"]) or "none",
        )
    )
