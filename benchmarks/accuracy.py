"""How right the predicted step is: fitted on some published runs, judged on others.

    python benchmarks/accuracy.py [--json] [--write]

Coefficients are fitted on `split=fit` of the measured runs beside the project and judged on
`split=heldout`, which no coefficient has seen. `--write` puts the coefficients into the catalogue
and the report into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.validation import FOLDER, Row, constant_efficiency, predict, read_rows
from shardwise.predict.cost import Coefficients

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("A100", "H100")
# Of the device's own silicon; the rest is shared by all.
OWN = ("matmul_efficiency", "matmul_half_s", "attention_efficiency")
# Where the fit starts and what it returns to where rows say nothing.
PRIOR = {
    "A100": Coefficients(0.75, 1e-4, 0.45, 1.0, 6e-6, 0.6, 0.6, 5e-6, 2e-5, 0.1, 1.5),
    "H100": Coefficients(0.65, 8e-5, 0.35, 1.0, 6e-6, 0.6, 0.6, 5e-6, 2e-5, 0.1, 1.5),
}
PRIOR_WEIGHT = 0.05
UNITS = {
    "matmul_efficiency": "of the dense peak, for large matmuls",
    "matmul_half_s": "seconds at the peak of a block's pass that reaches half of that",
    "attention_efficiency": "of the dense peak, for the causal half",
    "elementwise_factor": "bytes moved per byte that element-wise operations touch",
    "launch_s": "seconds per kernel, at least",
    "link_efficiency": "of the link inside a node",
    "network_efficiency": "of the network between nodes",
    "hop_latency_s": "seconds per hop inside a node",
    "network_latency_s": "seconds per doubling of nodes",
    "contention": "seconds lost per second of compute beside a collective",
    "optimizer_factor": "passes over parameters, gradients and states",
}


def _pack(values: dict[str, Coefficients]) -> np.ndarray[Any, Any]:
    own = [getattr(values[family], name) for family in FAMILIES for name in OWN]
    shared = [getattr(values["A100"], name) for name in Coefficients._fields if name not in OWN]
    return np.log(np.asarray([*own, *shared]))


def _unpack(packed: np.ndarray[Any, Any]) -> dict[str, Coefficients]:
    values = np.exp(packed)
    shared_names = [name for name in Coefficients._fields if name not in OWN]
    shared = dict(zip(shared_names, values[len(FAMILIES) * len(OWN) :], strict=True))
    for name in ("link_efficiency", "network_efficiency"):
        shared[name] = min(shared[name], 1.0)
    found = {}
    for number, family in enumerate(FAMILIES):
        own = values[number * len(OWN) : (number + 1) * len(OWN)]
        mine = {**shared, **dict(zip(OWN, own, strict=True))}
        found[family] = Coefficients(**{k: float(v) for k, v in mine.items()})
    return found


def fit(rows: Sequence[Row], rounds: int = 12) -> tuple[dict[str, Coefficients], Any]:
    """Least squares of log errors, robust against odd rows, with a weak pull to the prior."""
    chosen = list(rows)
    truth = np.log([row.tokens_per_s for row in chosen])
    prior = _pack(PRIOR)

    def residuals(packed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = np.log(predict(chosen, _unpack(packed)))
        return np.concatenate([found - truth, PRIOR_WEIGHT * (packed - prior)])

    done = least_squares(residuals, prior, loss="soft_l1", f_scale=0.05, max_nfev=rounds)
    return _unpack(done.x), done


def errors(rows: Sequence[Row], predicted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return predicted / np.asarray([row.tokens_per_s for row in rows]) - 1


def summary(relative: np.ndarray[Any, Any]) -> dict[str, float]:
    size = np.abs(relative)
    return {
        "rows": len(size),
        "median_error": float(np.median(size)),
        "mean_error": float(size.mean()),
        "p90_error": float(np.quantile(size, 0.9)),
        "max_error": float(size.max()),
    }


def interval(rows: Sequence[Row]) -> float:
    """The relative error that 90 % of rows stay within when their source was not fitted on."""
    found: list[float] = []
    for source in sorted({row.source for row in rows}):
        inside = [row for row in rows if row.source == source]
        others = [row for row in rows if row.source != source]
        values, _ = fit(others, rounds=6)
        found += list(np.abs(errors(inside, predict(inside, values))))
    return float(np.quantile(found, 0.9))


def transfer(rows: Sequence[Row]) -> dict[str, Any]:
    """Fitted where one can measure, tested where one cannot yet."""
    small = [row for row in rows if row.devices == 8]
    large = [row for row in rows if 16 <= row.devices <= 512]
    few = [
        row for family in FAMILIES for row in _spread([r for r in rows if r.family == family], 6)
    ]
    rest = [row for row in rows if row not in few]
    return {
        "8_to_512": summary(errors(large, predict(large, fit(small)[0]))),
        "6_rows": summary(errors(rest, predict(rest, fit(few)[0]))),
    }


def _spread(rows: list[Row], count: int) -> list[Row]:
    """`count` rows from the smallest to the largest model."""
    ordered = sorted(rows, key=lambda row: (row.units.numel, row.units.seq_len, row.id))
    return [ordered[int(i)] for i in np.linspace(0, len(ordered) - 1, count)]


def study() -> dict[str, Any]:
    rows, left_out = read_rows()
    fitted = [row for row in rows if row.split == "fit"]
    held = [row for row in rows if row.split == "heldout"]
    values, done = fit(fitted)
    half_width = interval(fitted)
    found = errors(held, predict(held, values))
    coverage = float((np.abs(found) <= half_width).mean())
    sources: dict[str, list[float]] = {}
    for row, error in zip(held, found, strict=True):
        sources.setdefault(row.source, []).append(float(error))
    worst = sorted(zip(np.abs(found), held, found, strict=True), key=lambda t: -t[0])[:10]
    same_source = [row for row in rows if "llm-foundry" in row.source]
    return {
        "heldout": {**summary(found), "coverage90": coverage, "interval90": half_width},
        "baseline": summary(errors(held, constant_efficiency(fitted, held))),
        "fit": summary(errors(fitted, predict(fitted, values))),
        "transfer": transfer(same_source),
        "sources": {
            source: {"rows": len(e), "median_error": float(np.median(np.abs(e))),
                     "bias": float(np.median(e))}
            for source, e in sorted(sources.items(), key=lambda item: -len(item[1]))
        },
        "worst": [
            {"id": row.id, "source": row.source, "error": float(error), "devices": row.devices}
            for _, row, error in worst
        ],
        "coefficients": {family: value._asdict() for family, value in values.items()},
        "spread": _spread_of(done),
        "left_out": left_out,
    }  # fmt: skip


def _spread_of(done: Any) -> dict[str, float]:
    """One standard deviation of each coefficient, as a factor."""
    covariance = np.linalg.pinv(done.jac.T @ done.jac) * 2 * done.cost / max(1, len(done.fun))
    names = [f"{f}.{n}" for f in FAMILIES for n in OWN]
    names += [n for n in Coefficients._fields if n not in OWN]
    return {n: float(np.exp(np.sqrt(v))) for n, v in zip(names, np.diag(covariance), strict=True)}


def write_catalogue(result: dict[str, Any]) -> None:
    """Replace the fitted sections of coefficients.toml."""
    path = ROOT / "src/shardwise/spec/catalogue/coefficients.toml"
    kept = path.read_text().split("# Fitted by benchmarks/accuracy.py")[0].rstrip()
    rows = result["fit"]["rows"]
    lines = ["", "", "# Fitted by benchmarks/accuracy.py; rewritten by it.", ""]
    for family, values in result["coefficients"].items():
        for name, value in values.items():
            spread = result["spread"].get(f"{family}.{name}", result["spread"].get(name, 1.0))
            lines += [
                f"[step-{family}.{name}]",
                f'unit = "{UNITS[name]}"',
                f"value = {value:.4g}",
                f"low = {value / spread**1.645:.4g}",
                f"high = {value * spread**1.645:.4g}",
                f'source = "fitted on {rows} published runs (split=fit) of A100 and H100"',
                "",
            ]
    lines += [
        "[step-interval]",
        'unit = "relative error of a step time that 90 % of runs stay within"',
        f"low = {-result['heldout']['interval90']:.3f}",
        f"high = {result['heldout']['interval90']:.3f}",
        'source = "leaving each fitted source out in turn"',
        "",
    ]
    path.write_text(kept + "\n".join(lines))


def report(result: dict[str, Any]) -> str:
    """docs/accuracy.md."""
    held, base = result["heldout"], result["baseline"]

    def row(name: str, r: dict[str, Any]) -> str:
        values = (r["median_error"], r["mean_error"], r["p90_error"], r["max_error"])
        return f"| {name} | {r['rows']} | " + " | ".join(f"{v:.1%}" for v in values) + " |"

    lines = [
        "# How right it is",
        "",
        "Tokens per second of published runs, predicted and measured. Coefficients were fitted on "
        f"{result['fit']['rows']} rows and judged on {held['rows']} others. Made by "
        "`python benchmarks/accuracy.py --write`.",
        "",
        "| error of tokens/s | rows | median | mean | 90th percentile | largest |",
        "|---|---|---|---|---|---|",
        row("**held out**", held),
        row("one constant efficiency per family of devices", base),
        row("fitted rows themselves", result["fit"]),
        row("fitted on 8 GPUs, tested on 16 to 512", result["transfer"]["8_to_512"]),
        row("fitted on 6 rows per device", result["transfer"]["6_rows"]),
        "",
        f"The 90 % interval is ±{held['interval90']:.0%}, from leaving each fitted source out in "
        f"turn; it covers {held['coverage90']:.0%} of the held-out rows.",
        "",
        "Other tools on 209 rows of one of these tables, mean error: llm-analysis as shipped "
        "93.5 %, with its efficiency set by hand 16.8 %; Calculon 29.6 %.",
        "",
        "## By source (held out)",
        "",
        "| source | rows | median error | bias |",
        "|---|---|---|---|",
        *(
            f"| {name} | {s['rows']} | {s['median_error']:.1%} | {s['bias']:+.1%} |"
            for name, s in result["sources"].items()
        ),
        "",
        "## The worst rows",
        "",
        "| row | source | devices | error |",
        "|---|---|---|---|",
        *(
            f"| {w['id']} | {w['source']} | {w['devices']} | {w['error']:+.0%} |"
            for w in result["worst"]
        ),
        "",
        "Left out: " + ("; ".join(result["left_out"]) or "none") + ".",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="update the catalogue and the docs")
    options = parser.parse_args()
    if not FOLDER.is_dir():
        sys.exit("needs the measured runs in ../shared/validation")
    result = study()
    if options.write:
        write_catalogue(result)
        (ROOT / "docs" / "accuracy.md").write_text(report(result))
    print(json.dumps(result, indent=2) if options.json else report(result))


if __name__ == "__main__":
    main()
