"""Accuracy of predicted steps: coefficients fitted on some published runs, tested on others.

    python benchmarks/accuracy.py [--json] [--write]

Coefficients are fitted on the rows with `split=fit` (and compiled ones with `split=aux`) and tested
on those with `split=heldout`, which were not used in any fit. Memory uses `mem_split` in the same
way. `--write` updates the coefficients in the catalogue, and the report and its figure in docs.
What is judged with the catalogue's own figures is judged after that, in a process that reads them
anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import memory, memory_2026, prices
from benchmarks.intervals import REGIMES, Intervals, deviations
from benchmarks.intervals import find as find_intervals
from benchmarks.multidim import report as multidim
from benchmarks.prices import LeftOut, Values, predicted, stack_of
from benchmarks.published_2026 import is_recent, read_2026
from benchmarks.validation import Row, constant_efficiency, read_compiled, read_low_bits, read_rows
from shardwise.spec.catalogue import figure as catalogued

Numbers = npt.NDArray[np.floating[Any]]

# Held-out rows on so many devices are also judged on their own.
LARGE = 128
# The share of measured pairs whose ratio is predicted to the error of comparison.
COMPARED = 0.8


def errors(rows: Sequence[Row], predicted: Numbers) -> Numbers:
    relative: Numbers = predicted / np.asarray([row.tokens_per_s for row in rows]) - 1
    return relative


def summary(relative: Numbers) -> dict[str, float]:
    size = np.abs(relative)
    return {
        "rows": len(size),
        "median_error": float(np.median(size)),
        "mean_error": float(size.mean()),
        "p90_error": float(np.quantile(size, 0.9)),
        "max_error": float(size.max()),
    }


class Pair(NamedTuple):
    """How far the predicted ratio of two runs is off the measured one, as a logarithm."""

    off: float
    # All pairs of one model on one machine weigh as much as one.
    weight: float


def pairs(rows: Sequence[Row], predicted: Numbers) -> list[Pair]:
    """Two runs of one model on one machine with one software, laid out or batched differently."""
    machines: dict[tuple[object, ...], list[tuple[Row, float]]] = {}
    for row, off in zip(rows, np.log1p(errors(rows, predicted)), strict=True):
        units = row.units
        same = (row.source, row.gpu, row.devices, units.numel, units.seq_len, row.compiled)
        machines.setdefault(same, []).append((row, float(off)))
    found = []
    for runs in machines.values():
        off = [a - b for (one, a), (other, b) in combinations(runs, 2)
               if one.strategy != other.strategy]  # fmt: skip
        found += [Pair(abs(each), 1 / len(off)) for each in off]
    return found


def comparison(found: Sequence[Pair]) -> float:
    """The error of comparison: four of five pairs are off by no more."""
    ordered = sorted(found)
    reached = np.cumsum([pair.weight for pair in ordered])
    index = int(np.searchsorted(reached, COMPARED * reached[-1]))
    return float(np.expm1(ordered[index].off))


def coverage(
    rows: Sequence[Row], relative: Numbers, intervals: Intervals, stacks: set[str]
) -> float:
    """The share of rows inside their interval; `stacks` are those that were fitted."""
    widths = [intervals.of(row, known=stack_of(row) in stacks) for row in rows]
    return float((np.abs(np.log1p(relative)) <= np.asarray(widths)).mean())


def _pairs_within(found: Sequence[Pair], error: float) -> float:
    """The share of pairs whose ratio is off by no more than this."""
    return float(np.mean([pair.off <= np.log1p(error) for pair in found]))


def transfer(rows: list[Row]) -> dict[str, Any]:
    """Errors of fits on few or small runs of one project, tested on its other or larger runs."""
    same = [row for row in rows if "llm-foundry" in row.source]
    small = [row for row in same if row.devices == 8]
    large = [row for row in same if 16 <= row.devices <= 512]
    # A user starts from coefficients fitted on other stacks and adds 6 runs of each GPU.
    others = [row for row in rows if row not in same and row.split == "fit"]
    gpus = sorted({row.gpu for row in same})
    few = [row for gpu in gpus for row in _spread([r for r in same if r.gpu == gpu], 6)]
    rest = [row for row in same if row not in few]
    return {
        "8_to_512": summary(errors(large, predicted(large, prices.fit(small).values))),
        "6_rows": summary(errors(rest, predicted(rest, prices.fit([*others, *few]).values))),
    }


def _spread(rows: list[Row], count: int) -> list[Row]:
    """`count` rows from the smallest to the largest model."""
    ordered = sorted(rows, key=lambda row: (row.units.numel, row.units.seq_len, row.id))
    return [ordered[int(i)] for i in np.linspace(0, len(ordered) - 1, count)]


def judged_as_shipped() -> dict[str, float]:
    """Errors on held-out rows with the coefficients of the catalogue; quick, without a fit."""
    held = read_rows(("heldout",))[0]
    values = prices.shipped()
    found = errors(held, predicted(held, values))
    return {
        **summary(found),
        "coverage90": coverage(held, found, _shipped_intervals(), _levels(values)),
    }


def _levels(values: Values) -> set[str]:
    """The stacks whose level was fitted."""
    return {name.removesuffix(".level") for name in values if name.endswith(".level")}


def _shipped_intervals() -> Intervals:
    known = {regime: catalogued(f"interval-{regime}-known") for regime in REGIMES}
    new = {regime: catalogued(f"interval-{regime}-new") for regime in REGIMES}
    return Intervals(
        known,
        new,
        catalogued("interval-device"),
        catalogued("interval_per_doubling"),
        between={regime: catalogued(f"between-{regime}") for regime in REGIMES},
        within={regime: catalogued(f"within-{regime}") for regime in REGIMES},
    )


def one_step_given(alone: Sequence[LeftOut]) -> dict[str, dict[str, float]]:
    """A stack that nobody has measured, with one measured step of it on the same GPU: all pairs."""
    found: dict[str, list[float]] = {"dense": [], "RL": []}
    weights = {regime: deviations(alone, regime).weight(1) for regime in REGIMES}
    for one in alone:
        for given, off in zip(one.rows, one.off, strict=True):
            shown = weights[given.regime] * off
            found.setdefault(given.regime, []).extend(
                float(np.expm1(other - shown))
                for row, other in zip(one.rows, one.off, strict=True)
                if row is not given and row.gpu == given.gpu and row.regime == given.regime
            )
    return {regime: summary(np.asarray(off)) for regime, off in found.items() if off}


def by_regime(alone: Sequence[LeftOut]) -> dict[str, dict[str, float]]:
    """Errors of stacks left out whole: those of the older tables, all dense ones, and others."""

    def told(chosen: Callable[[Row], bool]) -> dict[str, float]:
        off = [
            one.off[[chosen(row) for row in one.rows]]
            for one in alone
            if any(chosen(row) for row in one.rows)
        ]
        return summary(np.expm1(np.concatenate(off)))

    regimes = {row.regime for one in alone for row in one.rows}
    return {
        "old": told(lambda row: row.split == "fit" and not is_recent(row)),
        **{
            name: told(lambda row, name=name: row.regime == name)  # type: ignore[misc]
            for name in REGIMES
            if name in regimes
        },
    }


def other_devices(rows: Sequence[Row], values: Values) -> dict[str, dict[str, Any]]:
    """Runs on generations of devices that no run was fitted on, by device: kernels alone."""
    found: dict[str, dict[str, Any]] = {}
    blind = [row for row in rows if not prices.can_be_fitted(row)]
    for gpu, regime in dict.fromkeys((row.gpu, row.regime) for row in blind):
        mine = [row for row in blind if (row.gpu, row.regime) == (gpu, regime)]
        off = errors(mine, predicted(mine, values, level=False))
        found[f"{gpu}, {regime}"] = {**summary(off), "bias": float(np.median(off))}
    return found


def recent(splits: Sequence[str], values: Values, intervals: Intervals) -> dict[str, Any]:
    """Runs of 2024 to 2026 of these splits, by regime and by source."""
    rows, left = read_2026(splits)
    found = errors(rows, predicted(rows, values))
    stacks = _levels(values)

    def told(chosen: list[Row]) -> dict[str, float]:
        mine = found[[row in chosen for row in rows]]
        bias = float(np.median(mine))
        return {
            **summary(mine),
            "bias": bias,
            "coverage90": coverage(chosen, mine, intervals, stacks),
        }

    regimes = sorted({row.regime for row in rows})
    reasons: dict[str, int] = {}
    for one in left:
        reasons[one.why] = reasons.get(one.why, 0) + 1
    return {
        **told(rows),
        "regimes": {name: told([row for row in rows if row.regime == name]) for name in regimes},
        "sources": _by_source(rows, found),
        "rows_of": [
            {"id": row.id, "stack": stack_of(row), "gpu": row.gpu, "seq": row.units.seq_len,
             "error": float(error)}
            for row, error in zip(rows, found, strict=True)
        ],
        "left_out": dict(sorted(reasons.items(), key=lambda item: -item[1])),
    }  # fmt: skip


def fitted() -> dict[str, Any]:
    """Coefficients, their intervals, and errors of runs predicted with these coefficients."""
    rows, undescribed = read_rows()
    compiled = read_compiled()
    recent_rows, _ = read_2026(("fit",))
    low = read_low_bits()
    chosen_on = [row for row in rows if row.split == "fit"]
    held = [row for row in rows if row.split == "heldout"]
    known = [*chosen_on, *compiled, *low, *recent_rows]
    every = [row for row in known if prices.can_be_fitted(row)]
    values, spread = prices.fit(every)
    alone = prices.left_out(every, near=values)
    intervals = find_intervals(every, alone, values)
    compared = pairs(chosen_on, predicted(chosen_on, values))
    apart = comparison(compared)
    on_held = predicted(held, values)
    found = errors(held, on_held)
    stacks = _levels(values)
    constant = errors(held, constant_efficiency(chosen_on, held))
    worst = sorted(zip(np.abs(found), held, found, strict=True), key=lambda t: -t[0])[:12]
    return {
        "heldout": {
            **summary(found),
            "coverage90": coverage(held, found, intervals, stacks),
            "comparison": apart,
            "pairs": len(compared),
            "heldout_pairs": len(pairs(held, on_held)),
            "heldout_pairs_within": _pairs_within(pairs(held, on_held), apart),
        },
        "heldout_large": summary(found[[row.devices >= LARGE for row in held]]),
        "heldout_compiled": summary(found[[row.compiled for row in held]]),
        **_of_other_projects(held, found, chosen_on, compiled),
        "intervals": intervals._asdict(),
        "baseline": summary(constant),
        "same_table": summary(found[["llm-foundry" in row.source for row in held]]),
        "fit": summary(errors(every, predicted(every, values))),
        "fit_compiled": {"rows": sum(row.compiled for row in every)},
        "fit_low_bits": {"rows": sum(row.regime == "low-bit" for row in every)},
        "left_out": {
            one.stack: {**summary(np.expm1(one.off)), "bias": float(np.expm1(np.median(one.off)))}
            for one in alone
        },
        "other_devices": other_devices(known, values),
        "left_out_by_regime": by_regime(alone),
        "one_step_given": one_step_given(alone),
        "y2026_time": {split: recent((split,), values, intervals) for split in ("fit", "heldout")},
        "transfer": transfer(rows),
        "memory_margin": memory.calibration(memory.read_runs()[0]),
        "sources": _by_source(held, found),
        "worst": [
            {"id": row.id, "source": row.source, "error": float(error), "devices": row.devices}
            for _, row, error in worst
        ],
        "points": [
            {"family": row.kind, "measured": row.tokens_per_s, "predicted": float(value)}
            for row, value in zip(held, on_held, strict=True)
        ],
        "coefficients": values,
        "spread": spread,
        "identified": prices.identified(every, values),
        "undescribed": undescribed,
    }


def judged_with_catalogue() -> dict[str, Any]:
    """Errors of memory and of several dimensions, predicted with the figures of the catalogue."""
    return {
        "y2026_memory": {split: memory_2026.study((split,)) for split in ("fit", "heldout")},
        "memory": memory.study(),
        "multidim": multidim.study(),
    }


def study(publish: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """All errors; `publish` gets the fitted part before figures of the catalogue are read."""
    found = fitted()
    if publish is not None:
        publish(found)
    # This process has read the catalogue as it was.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as anew:
        found |= anew.submit(judged_with_catalogue).result()
    time, size = found.pop("y2026_time"), found.pop("y2026_memory")
    return {**found, "y2026": {"time": time, "memory": size}}


def project(source: str) -> str:
    """The repository of a source: two of its pages are not independent."""
    first = source.split(maxsplit=1)[0]
    return first if "/" in first else source


def _of_other_projects(
    held: list[Row], relative: Numbers, fitted: list[Row], compiled: list[Row]
) -> dict[str, dict[str, float]]:
    """Errors on projects of which no row was fitted, and on those without a compiled row either."""
    known = {project(row.source) for row in fitted}
    compiled_too = known | {project(row.source) for row in compiled}
    return {
        name: summary(relative[[project(row.source) not in seen for row in held]])
        for name, seen in (("unseen", known), ("unseen_compiled_too", compiled_too))
    }


def _by_source(rows: list[Row], relative: Numbers) -> dict[str, dict[str, float]]:
    """Errors of each source, that with the most rows first."""
    sources: dict[str, list[float]] = {}
    for row, error in zip(rows, relative, strict=True):
        sources.setdefault(row.source, []).append(float(error))
    return {
        source: {
            "rows": len(e),
            "median_error": float(np.median(np.abs(e))),
            "bias": float(np.median(e)),
        }
        for source, e in sorted(sources.items(), key=lambda item: -len(item[1]))
    }


def main() -> None:
    from benchmarks import accuracy_page
    from benchmarks.accuracy_catalogue import ROOT, write_catalogue
    from benchmarks.accuracy_figure import figure

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="update the catalogue and the docs")
    options = parser.parse_args()
    result = study(write_catalogue if options.write else None)
    if options.write:
        docs = ROOT / "docs"
        (docs / "accuracy.md").write_text(accuracy_page.page(result))
        (docs / "accuracy-tables.md").write_text(accuracy_page.tables(result))
        (docs / "accuracy.svg").write_text(figure(result["points"]))
    print(json.dumps(result, indent=2) if options.json else accuracy_page.page(result))


if __name__ == "__main__":
    main()
