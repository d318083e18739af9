"""Accuracy of predicted steps: coefficients fitted on some published runs, tested on others.

    python benchmarks/accuracy.py [--json] [--write]

Coefficients are fitted on the rows with `split=fit` and tested on those with `split=heldout`, which
were not used in any fit. Memory uses `mem_split` in the same way. `--write` updates the
coefficients in the catalogue, and the report and its figure in docs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import memory
from benchmarks.multidim import report as multidim
from benchmarks.validation import (
    Row,
    constant_efficiency,
    predict,
    read_compiled,
    read_rows,
)
from shardwise.predict.rates import Coefficients
from shardwise.spec.catalogue import coefficient, step_coefficients
from shardwise.spec.catalogue import figure as catalogued

Numbers = npt.NDArray[np.floating[Any]]
# Takes rows to fit on and rows to predict; returns tokens per second of the latter.
Method = Callable[[list[Row], list[Row]], Numbers]

# Held-out rows on so many devices are also judged on their own.
LARGE = 128

FAMILIES = ("A100", "H100")
# Coefficients per device family; all others are shared.
OWN = ("matmul_efficiency", "matmul_half_s", "attention_efficiency")
# Coefficients with a default are for CPUs and are not fitted, except those of trees.
TREE = ("tree_efficiency", "tree_falloff")
SHARED = (
    *(
        name
        for name in Coefficients._fields
        if name not in OWN and name not in Coefficients._field_defaults
    ),
    *TREE,
)
# Start of the fit, and its result where rows carry no information.
START = Coefficients(
    0.75, 1e-4, 0.45, 1.0, 6e-6, 0.6, 0.6, 1e-5, 3e-5, 0.1, 2.2,
    tree_efficiency=1.0, tree_falloff=0.1,
)  # fmt: skip
PRIOR = {
    "A100": START,
    "H100": START._replace(matmul_efficiency=0.65, matmul_half_s=8e-5, attention_efficiency=0.35),
}
PRIOR_WEIGHT = 0.05
COVERED = 0.9
# The share of measured pairs whose ratio is predicted to the error of comparison.
COMPARED = 0.8
# Share of element-wise traffic left where blocks are compiled: expected, and the least. A fused
# kernel still reads its inputs and writes its outputs.
COMPILED_PRIOR, COMPILED_LEAST = 0.4, 0.1
# Up to so many nodes at least three fitted sources have runs; beyond, intervals widen.
INTERVAL_NODES = 16
# What is assumed of the widening per doubling of nodes where rows show less.
LEAST_PER_DOUBLING = 0.1


def _pack(values: dict[str, Coefficients]) -> Numbers:
    own = [getattr(values[family], name) for family in FAMILIES for name in OWN]
    shared = [getattr(values["A100"], name) for name in SHARED]
    packed: Numbers = np.log(np.asarray([*own, *shared]))
    return packed


def _unpack(packed: Numbers) -> dict[str, Coefficients]:
    values = np.exp(packed)
    shared = dict(zip(SHARED, values[len(FAMILIES) * len(OWN) :], strict=True))
    for name in ("link_efficiency", "network_efficiency"):
        shared[name] = min(shared[name], 1.0)
    found = {}
    for number, family in enumerate(FAMILIES):
        own = values[number * len(OWN) : (number + 1) * len(OWN)]
        mine = {**shared, **dict(zip(OWN, own, strict=True))}
        found[family] = Coefficients(**{k: float(v) for k, v in mine.items()})
    return found


def fit(
    rows: Sequence[Row], rounds: int = 14, start: dict[str, Coefficients] = PRIOR
) -> tuple[dict[str, Coefficients], Any]:
    """Least squares of log errors, robust against outliers, with a weak prior at `start`."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # only for fits

    chosen = list(rows)
    truth = np.log([row.tokens_per_s for row in chosen])
    prior = _pack(start)

    def residuals(packed: Numbers) -> Numbers:
        found = np.log(predict(chosen, _unpack(packed)))
        return np.concatenate([found - truth, PRIOR_WEIGHT * (packed - prior)])

    done = least_squares(
        residuals, prior, loss="soft_l1", f_scale=0.05, max_nfev=rounds, x_scale="jac"
    )
    return _unpack(done.x), done


def fit_compiled(values: dict[str, Coefficients], rows: list[Row]) -> dict[str, Coefficients]:
    """Add the share of element-wise traffic that compiled blocks have left; one for all devices."""
    from scipy.optimize import least_squares

    truth = np.log([row.tokens_per_s for row in rows])

    def with_share(share: float) -> dict[str, Coefficients]:
        return {name: k._replace(compiled_elementwise=share) for name, k in values.items()}

    def residuals(packed: Numbers) -> Numbers:
        found = np.log(predict(rows, with_share(float(np.exp(packed[0])))))
        return np.append(found - truth, PRIOR_WEIGHT * (packed[0] - np.log(COMPILED_PRIOR)))

    start = np.asarray([np.log(COMPILED_PRIOR)])
    done = least_squares(
        residuals, start, loss="soft_l1", f_scale=0.05, bounds=(np.log(COMPILED_LEAST), 0.0)
    )
    return with_share(float(np.exp(done.x[0])))


def shipped() -> dict[str, Coefficients]:
    return {family: Coefficients(**step_coefficients(family)) for family in FAMILIES}


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


class LeftOut(NamedTuple):
    """The rows of a source, and their log errors when it is left out of the fit."""

    rows: list[Row]
    off: Numbers


def left_out(rows: list[Row], method: Method) -> list[LeftOut]:
    """Each source left out of the fit once."""
    found = []
    for source in sorted({row.source for row in rows}):
        inside = [row for row in rows if row.source == source]
        others = [row for row in rows if row.source != source]
        found.append(LeftOut(inside, np.log1p(errors(inside, method(others, inside)))))
    return found


class Growth(NamedTuple):
    """How intervals widen on a logarithmic scale: per doubling of nodes, and where compiled."""

    per_doubling: float = 0.0
    compiled: float = 1.0

    def of(self, rows: Sequence[Row]) -> Numbers:
        nodes = np.asarray([row.nodes for row in rows], dtype=float)
        doublings = np.maximum(0.0, np.log2(nodes / INTERVAL_NODES))
        compiled = np.asarray([row.compiled for row in rows])
        grown: Numbers = 1.0 + self.per_doubling * doublings
        return grown * np.where(compiled, self.compiled, 1.0)


def growth(alone: list[LeftOut], compiled: list[LeftOut]) -> Growth:
    """How much larger errors are beyond the nodes most sources have, and of compiled rows."""

    def beyond(one: LeftOut) -> Any:
        return np.asarray([row.nodes > INTERVAL_NODES for row in one.rows])

    within = [one.off[~beyond(one)] for one in alone if (~beyond(one)).any()]
    base = np.log(interval(within))
    far = [one for one in alone if beyond(one).any()]
    doublings = np.mean(
        [np.log2(row.nodes / INTERVAL_NODES) for one in far for row in one.rows
         if row.nodes > INTERVAL_NODES]
    )  # fmt: skip
    larger = np.log(interval([one.off[beyond(one)] for one in far])) / base - 1.0
    spread = np.log(interval([one.off for one in compiled]))
    return Growth(
        per_doubling=max(LEAST_PER_DOUBLING, float(larger / doublings)),
        compiled=float(np.sqrt(1.0 + (spread / base) ** 2)),
    )


def interval(by_source: list[Numbers]) -> float:
    """The factor, up or down, that 90 % of rows stay within.

    Each source has the same weight, however many rows it has: a user's run is a new source, not
    one more row of the largest. The level is slightly higher because the sample is finite.
    """
    sizes = np.concatenate([np.abs(off) for off in by_source])
    shares = np.concatenate([np.full(len(off), 1 / len(off)) for off in by_source])
    order = np.argsort(sizes)
    reached = np.cumsum(shares[order]) / shares.sum()
    level = min(1.0, COVERED * (1 + 1 / len(sizes)))
    return float(np.exp(sizes[order][np.searchsorted(reached, level)]))


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


def coverage(relative: Numbers, factor: float, grown: Numbers | float = 1.0) -> float:
    return float((np.abs(np.log1p(relative)) <= np.log(factor) * grown).mean())


def _pairs_within(found: Sequence[Pair], error: float) -> float:
    """The share of pairs whose ratio is off by no more than this."""
    return float(np.mean([pair.off <= np.log1p(error) for pair in found]))


def _fitted(others: list[Row], inside: list[Row]) -> Numbers:
    return predict(inside, fit(others, rounds=10)[0])


def transfer(rows: list[Row]) -> dict[str, Any]:
    """Errors of fits on few or small runs of one project, tested on its other or larger runs."""
    same = [row for row in rows if "llm-foundry" in row.source]
    small = [row for row in same if row.devices == 8]
    large = [row for row in same if 16 <= row.devices <= 512]
    # A user starts from coefficients fitted on other stacks and adds 6 runs of each GPU.
    elsewhere = fit([row for row in rows if row not in same and row.split == "fit"])[0]
    gpus = sorted({row.gpu for row in same})
    few = [row for gpu in gpus for row in _spread([r for r in same if r.gpu == gpu], 6)]
    rest = [row for row in same if row not in few]
    return {
        "8_to_512": summary(errors(large, predict(large, fit(small)[0]))),
        "6_rows": summary(errors(rest, predict(rest, fit(few, start=elsewhere)[0]))),
    }


def _spread(rows: list[Row], count: int) -> list[Row]:
    """`count` rows from the smallest to the largest model."""
    ordered = sorted(rows, key=lambda row: (row.units.numel, row.units.seq_len, row.id))
    return [ordered[int(i)] for i in np.linspace(0, len(ordered) - 1, count)]


def judged_as_shipped() -> dict[str, float]:
    """Errors on held-out rows with the coefficients of the catalogue; quick, without a fit."""
    held = read_rows(("heldout",))[0]
    found = errors(held, predict(held, shipped()))
    _, high = coefficient("step-interval")
    grown = Growth(catalogued("interval_per_doubling"), catalogued("interval_compiled")).of(held)
    return {**summary(found), "coverage90": coverage(found, 1 + high, grown)}


class Fitted(NamedTuple):
    """All that follows from fitted and compiled rows, without a look at held-out ones."""

    values: dict[str, Coefficients]
    done: Any
    factor: float
    comparison: float
    grown: Growth


def fit_all(rows: list[Row], compiled: list[Row]) -> Fitted:
    """Coefficients and intervals."""
    values, done = fit(rows)
    alone = left_out(rows, _fitted)

    def method(others: list[Row], inside: list[Row]) -> Numbers:
        return predict(inside, fit_compiled(values, others))

    grown = growth(alone, left_out(compiled, method))
    return Fitted(
        fit_compiled(values, compiled),
        done,
        interval([one.off / grown.of(one.rows) for one in alone]),
        comparison(pairs(rows, predict(rows, values))),
        grown,
    )


def study() -> dict[str, Any]:
    rows, undescribed = read_rows()
    compiled = read_compiled()
    fitted = [row for row in rows if row.split == "fit"]
    held = [row for row in rows if row.split == "heldout"]
    values, done, factor, apart, grown = fit_all(fitted, compiled)
    predicted = predict(held, values)
    found = errors(held, predicted)
    constant = errors(held, constant_efficiency(fitted, held))
    constant_factor = interval([one.off for one in left_out(fitted, constant_efficiency)])
    worst = sorted(zip(np.abs(found), held, found, strict=True), key=lambda t: -t[0])[:12]
    return {
        "heldout": {
            **summary(found),
            "coverage90": coverage(found, factor, grown.of(held)),
            "factor90": factor,
            "comparison": apart,
            "pairs": len(pairs(fitted, predict(fitted, values))),
            "heldout_pairs": len(pairs(held, predicted)),
            "heldout_pairs_within": _pairs_within(pairs(held, predicted), apart),
        },
        "heldout_large": summary(found[[row.devices >= LARGE for row in held]]),
        "heldout_compiled": summary(found[[row.compiled for row in held]]),
        **_of_other_projects(held, found, fitted, compiled),
        "growth": {"nodes": INTERVAL_NODES, **grown._asdict()},
        "baseline": {
            **summary(constant),
            "coverage90": coverage(constant, constant_factor),
            "factor90": constant_factor,
        },
        "same_table": summary(found[["llm-foundry" in row.source for row in held]]),
        "fit": summary(errors(fitted, predict(fitted, values))),
        "fit_compiled": summary(errors(compiled, predict(compiled, values))),
        "transfer": transfer(rows),
        "memory": memory.study(),
        "multidim": multidim.study(),
        "sources": _by_source(held, found),
        "worst": [
            {"id": row.id, "source": row.source, "error": float(error), "devices": row.devices}
            for _, row, error in worst
        ],
        "points": [
            {"family": row.family, "measured": row.tokens_per_s, "predicted": float(value)}
            for row, value in zip(held, predicted, strict=True)
        ],
        "coefficients": {family: value._asdict() for family, value in values.items()},
        "spread": _spread_of(done),
        "left_out": undescribed,
    }


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


def _spread_of(done: Any) -> dict[str, float]:
    """One standard deviation of each coefficient, as a factor."""
    covariance = np.linalg.pinv(done.jac.T @ done.jac) * 2 * done.cost / max(1, len(done.fun))
    names = [f"{f}.{n}" for f in FAMILIES for n in OWN]
    names += list(SHARED)
    return {n: float(np.exp(np.sqrt(v))) for n, v in zip(names, np.diag(covariance), strict=True)}


def main() -> None:
    from benchmarks.accuracy_report import figure, report, write_all

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="update the catalogue and the docs")
    options = parser.parse_args()
    result = study()
    if options.write:
        write_all(result, report(result), figure(result["points"]))
    print(json.dumps(result, indent=2) if options.json else report(result))


if __name__ == "__main__":
    main()
