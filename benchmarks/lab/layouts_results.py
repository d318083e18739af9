"""Accuracy of predictions for a sweep of layouts: fitted on six cells, tested on the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from benchmarks.lab.cases import load
from benchmarks.lab.layouts import Cell, Layouts, coefficients_of

# Layouts whose step times differ by less are not ranked.
APART = 0.10

Steps = Mapping[Cell, float]


def evaluate(sweep: Layouts) -> dict[str, Any]:
    """Errors, rankings and regret of predictions for the cells that were not fitted."""
    found, cells = sweep.fit(), sweep.cells
    k = coefficients_of(found)
    steps = {cell: one.step_s for cell, one in sweep.observations(cells).items()}
    predicted, untrained = sweep.predict(k, cells), sweep.predict(sweep.calibrated(), cells)
    return {
        "cells": len(cells),
        "held_out": len(sweep.held_out),
        **accuracy(sweep, predicted, steps),
        "untrained_median_error": accuracy(sweep, untrained, steps)["step_median_error"],
        **_as_written(sweep, steps),
        "fitted_errors": found.errors,
        "coefficients": k._asdict(),
        "rows": [
            {**cell._asdict(), "measured_s": steps[cell], "predicted_s": predicted[cell],
             "untrained_s": untrained[cell], "error": predicted[cell] / steps[cell] - 1,
             "calibrated_on": cell in sweep.fitted}
            for cell in cells
        ],
    }  # fmt: skip


def accuracy(sweep: Layouts, predicted: Steps, steps: Steps) -> dict[str, Any]:
    """Errors on the cells that were not fitted, and rankings and regret on all."""
    errors = _errors(sweep, predicted, steps)
    pairs = {rate: list(_pairs(sweep, rate, steps, predicted)) for rate in sweep.rates}
    judged = [pair for mine in pairs.values() for pair in mine]
    return {
        "step_median_error": statistics.median(errors),
        "step_p90_error": errors[round(0.9 * (len(errors) - 1))],
        "ranking_right": _share_right(judged),
        "ranking_pairs": len(judged),
        "ranking_wrong": [name for name, right in judged if not right],
        "ranking_by_rate": {rate: _share_right(mine) for rate, mine in pairs.items()},
        "top1_regret": max(_regret(sweep, *group, steps, predicted) for group in sweep.groups),
    }


def _errors(sweep: Layouts, predicted: Steps, measured: Steps) -> list[float]:
    """Of the cells that were not fitted, smallest first."""
    return sorted(abs(predicted[cell] / measured[cell] - 1) for cell in sweep.held_out)


def _as_written(sweep: Layouts, steps: Steps) -> dict[str, float]:
    """The median error of the predictions that were saved before the cells were trained."""
    saved = load(sweep.written)
    if saved is None:
        return {}
    written = {cell: saved["step_s"][cell.name] for cell in sweep.held_out}
    return {"written_median_error": statistics.median(_errors(sweep, written, steps))}


def _pairs(
    sweep: Layouts, rate: float, measured: Steps, predicted: Steps
) -> Iterator[tuple[str, bool]]:
    """Pairs of layouts at a rate that differ enough, and whether they are ranked correctly."""
    for batch in sweep.batches:
        for one, other in combinations(sweep.layouts, 2):
            a, b = Cell(rate, one, batch), Cell(rate, other, batch)
            if abs(math.log(measured[a] / measured[b])) > math.log(1 + APART):
                right = (measured[a] > measured[b]) == (predicted[a] > predicted[b])
                yield f"{a.name} against {b.name}", right


def _share_right(pairs: list[tuple[str, bool]]) -> float:
    """The share of pairs that are ranked correctly; 1 without pairs."""
    return sum(right for _, right in pairs) / len(pairs) if pairs else 1.0


def _regret(sweep: Layouts, rate: float, batch: int, measured: Steps, predicted: Steps) -> float:
    """How much slower the layout predicted fastest is than the fastest."""
    cells = [Cell(rate, layout, batch) for layout in sweep.layouts]
    chosen = min(cells, key=lambda cell: predicted[cell])
    return measured[chosen] / min(measured[cell] for cell in cells) - 1


def ratios(result: Mapping[str, Any], one: str, other: str) -> dict[str, dict[str, float]]:
    """Step time of a layout over another's, predicted and measured, by rate and batch."""
    rows = {(r["layout"], r["rate"], r["batch"]): r for r in result["rows"]}
    found = {}
    for layout, rate, batch in rows:
        if layout == one:
            mine, base = rows[one, rate, batch], rows[other, rate, batch]
            found[f"{rate / 1e6:.0f} Mbit/s, {batch}"] = {
                kind: mine[f"{kind}_s"] / base[f"{kind}_s"] for kind in ("predicted", "measured")
            }
    return found


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
    for rate, share in result["ranking_by_rate"].items():
        print(f"  {rate / 1e6:,.0f} Mbit/s: {share:.1%}")
    if "written_median_error" in result:
        print(f"as written before: {result['written_median_error']:.1%} (median)")
    print(f"the predicted fastest is at most {result['top1_regret']:.1%} slower than the best")
    for row in result["rows"]:
        name = Cell(row["rate"], row["layout"], row["batch"]).name
        print(
            f"  {name:34}{row['predicted_s'] * 1e3:8.0f} ms{row['measured_s'] * 1e3:8.0f} ms"
            f"{row['error']:+8.1%} {'fitted' if row['calibrated_on'] else ''}"
        )


def words(sweep: Layouts, result: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's section on a sweep says: its figures, and the rows of its table."""
    rows = []
    for rate, batch in sweep.groups:
        mine = {r["layout"]: r for r in result["rows"] if (r["rate"], r["batch"]) == (rate, batch)}
        cells = [
            f"{mine[layout]['measured_s'] * 1e3:.0f} ({mine[layout]['predicted_s'] * 1e3:.0f})"
            for layout in sweep.layouts
        ]
        rows.append(f"| {rate / 1e6:,.0f} Mbit/s | {batch} | {' | '.join(cells)} |")
    return {
        **{name: value for name, value in result.items() if isinstance(value, (int, float))},
        "head": " | ".join(sweep.layouts),
        "lines": "|".join("---" for _ in range(len(sweep.layouts) + 2)),
        "rows": "\n".join(rows),
        "calibrated": len(sweep.fitted),
        "wrong": ", ".join(result["ranking_wrong"]) or "none",
    }
