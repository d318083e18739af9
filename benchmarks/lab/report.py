"""Write docs/lab.md and its figures from the saved results of the experiments."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab import evaluate, expert, tensor
from benchmarks.lab.calibrated import CALIBRATED_ON, calibrated
from benchmarks.lab.cases import ROUNDS, STRATEGIES, load
from benchmarks.lab.experiments import CROSSING, QUESTIONS, of_the_hour, peak_bytes, predict
from benchmarks.lab.sweep import BATCHES, RATES, Cell
from shardwise.report.page.chart import Axis, Series, svg_file

DOCS = Path(__file__).resolve().parents[2] / "docs"
HERE = Path(__file__).parent
SECONDS = [(0.25, "0.25 s"), (0.5, "0.5 s"), (1.0, "1 s"), (2.0, "2 s"), (4.0, "4 s")]


def measure() -> Mapping[str, Any]:
    result = dict(evaluate.measure())
    result["questions"] = answers()
    result["tensor"] = tensor.evaluate()
    if load(expert.EXPERT.name) is not None:
        result["expert"] = expert.evaluate()
    for name, drawing in figures(result).items():
        (DOCS / f"lab-{name}.svg").write_text(drawing)
    (DOCS / "lab.md").write_text(page(result))
    return result


def show(result: Mapping[str, Any]) -> None:
    evaluate.show(result)
    print(f"written: {DOCS / 'lab.md'} and its figures")


def answers() -> dict[str, list[dict[str, Any]]]:
    """Predicted and measured results of all cases of the smaller experiments."""
    k = calibrated()
    found = {}
    for name, question in QUESTIONS.items():
        kept = load(name)
        if kept is None:
            continue
        rows = []
        here = of_the_hour(k, kept["cases"])
        for case in question.cases:
            mine, real = predict(case, here), kept["cases"][case.name]
            row = {"name": case.name, "predicted_s": mine.step_s, "measured_s": real["median_s"]}
            if "peak_bytes" in real:
                row |= {"predicted_bytes": peak_bytes(case), "measured_bytes": real["peak_bytes"],
                        "loss": real["loss"]}  # fmt: skip
            rows.append(row)
        found[name] = rows
    return found


# ---- figures --------------------------------------------------------------------------------


def _rates(rates: tuple[float, ...]) -> Axis:
    marks = [(r, f"{r / 1e9:g} Gbit/s" if r >= 1e9 else f"{r / 1e6:.0f} Mbit/s") for r in rates]
    return Axis.labelled("link between the hosts", marks, logarithmic=True)


def _lines(result: Mapping[str, Any], batch: int, measured: str, predicted: str) -> list[Series]:
    found = []
    for number, name in enumerate(STRATEGIES):
        cells = [c for c in result["cells"] if (c["strategy"], c["micro_batch"]) == (name, batch)]
        found += [
            _series(name, [(c["rate"], c[key]) for c in cells], kind, number)
            for kind, key in (("predicted", predicted), ("measured", measured))
        ]
    return found


def _series(name: str, points: list[tuple[float, float]], kind: str, colour: int) -> Series:
    """Predictions are lines, measurements dots."""
    return Series(name, points, kind, colour, line=kind == "predicted")


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """The five figures as SVG, with their titles and descriptions."""
    small = min(BATCHES)
    shares = [(share / 100, f"{share} %") for share in (0, 20, 40, 60, 80, 100)]
    drawn = {}
    drawn["step"] = svg_file(
        f"Step time against link rate ({small} sequences per rank)",
        _rates(RATES), Axis.labelled("", SECONDS, logarithmic=True),
        _lines(result, small, "measured_s", "predicted_s"),
        "Step time against link rate for four strategies: every doubling of a slow link nearly "
        "halves the step, and hybrid sharding and ddp lie below zero2 and zero3.",
    )  # fmt: skip
    drawn["exposed"] = svg_file(
        f"Exposed communication, share of a step ({small} sequences per rank)",
        _rates(RATES), Axis.labelled("", shares),
        _lines(result, small, "measured_exposed", "predicted_exposed"),
        "Exposed communication against link rate: from about nine tenths of a step at 250 Mbit/s "
        "down to about a third at 4 Gbit/s.",
    )  # fmt: skip
    if "crossover" in result["questions"]:
        drawn["crossover"] = _crossover(result["questions"]["crossover"])
    gains = []
    for number, name in enumerate(STRATEGIES):
        for kind in ("predicted", "measured"):
            doubled = [
                (rate, result["doubling"][f"{Cell(rate, name, small).name} doubled"][kind])
                for rate in RATES[:-1]
            ]
            gains.append(_series(name, doubled, kind, number))
    drawn["doubling"] = svg_file(
        f"Efficiency gained by doubling the link ({small} sequences per rank)",
        _rates(RATES[:-1])._replace(title="from this rate to twice the rate"),
        Axis.labelled("", [(s / 100, f"{s} %") for s in (-5, 0, 5, 10, 15, 20, 25)]),
        gains, "Efficiency gained by twice the rate, by strategy.",
    )  # fmt: skip
    drawn["right"] = _right(result)
    return drawn


def _crossover(rows: list[dict[str, Any]]) -> str:
    lines = []
    names = {"full": "full sharding", "hybrid": "hybrid, recomputes"}
    for number, (name, title) in enumerate(names.items()):
        mine = [row for row in rows if row["name"].endswith(name)]
        for kind in ("predicted", "measured"):
            points = [(r, row[f"{kind}_s"]) for r, row in zip(CROSSING, mine, strict=True)]
            lines.append(_series(title, points, kind, number + 2))
    marks = [(1.0, "1 s"), (1.2, "1.2 s"), (1.4, "1.4 s"), (1.6, "1.6 s"), (1.8, "1.8 s"),
             (2.0, "2 s")]  # fmt: skip
    return svg_file(
        "Same memory: the link rate decides which is faster",
        _rates(CROSSING), Axis.labelled("", marks, logarithmic=True), lines,
        "Step time against link rate: hybrid sharding with recomputation is faster on slow links, "
        "full sharding on fast ones.",
    )  # fmt: skip


def _right(result: Mapping[str, Any]) -> str:
    points = [
        _series(name, [(c["measured_s"], c["predicted_s"]) for c in result["cells"]
                      if c["strategy"] == name and not c["calibrated_on"]],
                "measured", number)
        for number, name in enumerate(STRATEGIES)
    ]  # fmt: skip
    others = [row for rows in result["questions"].values() for row in rows]
    points.append(
        _series("questions", [(r["measured_s"], r["predicted_s"]) for r in others], "measured", 4)
    )
    points.append(Series("", [(0.25, 0.25), (4.0, 4.0)], colour=5))
    count = result["held_out"] + len(others)
    return svg_file(
        f"Predicted against measured, {count} configurations never fitted",
        Axis.labelled("measured", SECONDS, True), Axis.labelled("predicted", SECONDS, True),
        points, "Predicted against measured step times: all points lie near the diagonal.",
    )  # fmt: skip


# ---- words ----------------------------------------------------------------------------------


def page(result: Mapping[str, Any]) -> str:
    from benchmarks.lab.__main__ import EXPERIMENTS

    cells = result["cells"]

    def best(rate: float, batch: int) -> str:
        mine = [c for c in cells if (c["rate"], c["micro_batch"]) == (rate, batch)]
        one = min(mine, key=lambda c: c["measured_s"])
        return f"{one['strategy']}, {one['measured_s'] * 1e3:.0f} ms"

    rows = [
        f"| {rate / 1e6:,.0f} Mbit/s | {' | '.join(best(rate, batch) for batch in BATCHES)} |"
        for rate in RATES
    ]
    words = {
        name: value
        for name, value in result.items()
        if isinstance(value, (int, float)) and name not in ("plan_regret", "tune_regret")
    }
    commands = [
        f"| `python -m benchmarks.lab {name}` | {found.title} |"
        for name, found in EXPERIMENTS.items()
    ]
    return (HERE / "page.md").read_text().format(
        **{"most_probes": 0, "crossover_factor": float("nan"), **words, **_memory(result)},
        calibrated=len(CALIBRATED_ON),
        doublings=len(result["doubling"]),
        rows="\n".join(rows),
        gains="\n".join(
            f"| {rate} | {gain['predicted']:.1%} | {gain['measured']:.1%} |"
            for rate, gain in result["doubling_by_rate"].items()
        ),
        wrong=", ".join(result["ranking_wrong"]) or "none",
        plan_regret=_regret(result, "plan_regret"),
        tune_regret=_regret(result, "tune_regret"),
        questions="\n\n".join(_answer(name, rows) for name, rows in result["questions"].items()),
        tensor=tensor.section(result["tensor"]),
        expert=expert.section(result["expert"]) if "expert" in result else "Not measured.",
        links=_links(),
        trust=_trust(),
        commands="\n".join(commands),
    )  # fmt: skip


def _memory(result: Mapping[str, Any]) -> dict[str, Any]:
    """The crossover rates and the memory that each strategy needs, for the page."""
    full, recomputed = (case for case in QUESTIONS["crossover"].cases[:2])
    kept = full._replace(strategy={**recomputed.strategy, "recompute": "none"})
    need = [peak_bytes(case) / 1e6 for case in (full, kept, recomputed)]
    crossing = result.get("crossover", {})
    rates = {
        f"crossing_{kind}": f"{rate / 1e9:.2f} Gbit/s" if rate else "no rate"
        for kind, rate in crossing.items()
    }
    return {"budget_mb": (need[0] + need[1]) / 2, "full_mb": need[0], "hybrid_mb": need[1],
            "recomputed_mb": need[2], **rates}  # fmt: skip


def _regret(result: Mapping[str, Any], name: str) -> str:
    if name not in result:
        return "not tried"
    lost = float(result[name])
    return f"{lost:.1%} slower at most" if lost > 0 else "never slower"


def _answer(name: str, rows: list[dict[str, Any]]) -> str:
    weighs = any("measured_bytes" in row for row in rows)
    lines = [f"**{QUESTIONS[name].title.capitalize()}** (`{name}`)", ""]
    lines += ["| | predicted | measured | error |" + (" peak predicted | measured |" * weighs),
              "|---|---|---|---|" + "---|---|" * weighs]  # fmt: skip
    for row in rows:
        mine, real = row["predicted_s"], row["measured_s"]
        line = f"| {row['name']} | {mine * 1e3:.0f} ms | {real * 1e3:.0f} ms |"
        line += f" {mine / real - 1:+.1%} |"
        if weighs:
            sizes = (row["predicted_bytes"] / 1e6, row["measured_bytes"] / 1e6)
            line += " {:.1f} MB | {:.1f} MB |".format(*sizes)
        lines.append(line)
    losses = {tuple(row["loss"]) for row in rows if "loss" in row}
    if losses:
        same = "are bit-identical" if len(losses) == 1 else "differ"
        lines += ["", f"Losses of all steps {same}."]
    return "\n".join(lines)


def _links() -> str:
    kept = load("collectives")
    if kept is None:
        return "Not measured."
    lines = ["| link | collective | latency | share of the link | R² |", "|---|---|---|---|---|"]
    for row in kept["collectives"]:
        if "share_of_rate" not in row:
            continue
        operation = row["operation"].replace("_", "-")
        lines.append(
            f"| {row['set_bits_per_s'] / 1e6:,.0f} Mbit/s | {operation}, {row['place']} | "
            f"{row['fixed_s'] * 1e3:.1f} ms | {row['share_of_rate']:.1%} | {row['r_squared']:.3f} |"
        )
    return "\n".join(lines)


def _trust() -> str:
    kept = load("sweep") or {}
    halves = [(c["p90_s"] - c["p10_s"]) / 2 / c["median_s"] for c in kept["cases"].values()]
    words = {
        "rounds": ROUNDS,
        "calibrated": len(CALIBRATED_ON),
        "spread": statistics.median(halves),
    }
    return (HERE / "trust.md").read_text().format(**words).strip()
