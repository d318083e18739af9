"""docs/lab.md and its figures, from what the last sweep measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab import evaluate
from benchmarks.lab.chart import Axis, Series, chart
from benchmarks.lab.evaluate import CALIBRATED_ON
from benchmarks.lab.sweep import BATCHES, RATES, STRATEGIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEMPLATE = Path(__file__).with_name("page.md")
RATE_AXIS = Axis(
    "link between the hosts",
    [(rate, f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.0f} M") for rate in RATES],
    logarithmic=True,
)


def measure() -> Mapping[str, Any]:
    result = evaluate.measure()
    for name, drawing in figures(result).items():
        (DOCS / f"lab-{name}.svg").write_text(drawing)
    (DOCS / "lab.md").write_text(page(result))
    return result


def show(result: Mapping[str, Any]) -> None:
    evaluate.show(result)
    print(f"written: {DOCS / 'lab.md'} and its figures")


def _lines(
    result: Mapping[str, Any], batch: int, measured: str, predicted: str, factor: float
) -> list[Series]:
    found = []
    for number, name in enumerate(STRATEGIES):
        cells = [c for c in result["cells"] if (c["strategy"], c["micro_batch"]) == (name, batch)]
        found.append(
            Series(name, [(c["rate"], factor * c[predicted]) for c in cells], False, number)
        )
        found.append(Series(name, [(c["rate"], factor * c[measured]) for c in cells], True, number))
    return found


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Five of them, each with its words."""
    seconds = [(0.25, "0.25 s"), (0.5, "0.5 s"), (1.0, "1 s"), (2.0, "2 s"), (4.0, "4 s")]
    shares = [(share / 100, f"{share} %") for share in (0, 20, 40, 60, 80, 100)]
    drawn = {}
    for batch, title in zip(BATCHES, ("little to compute", "more to compute"), strict=True):
        drawn[f"step-{batch}"] = chart(
            f"A step, {title} ({batch} sequences per rank)",
            RATE_AXIS, Axis("", seconds, logarithmic=True),
            _lines(result, batch, "measured_s", "predicted_s", 1.0),
            f"Step time against link rate for four strategies at micro-batch {batch}: every "
            "doubling of a slow link nearly halves the step, and hybrid sharding and ddp lie below "
            "zero2 and zero3.",
        )  # fmt: skip
    drawn["exposed"] = chart(
        "Waiting for the network, share of a step (2 sequences per rank)",
        RATE_AXIS, Axis("", shares),
        _lines(result, 2, "measured_exposed", "predicted_exposed", 1.0),
        "Exposed communication against link rate: from nine tenths of a step at 250 Mbit/s down to "
        "about half at 4 Gbit/s.",
    )  # fmt: skip
    points = [
        Series(name, [(c["measured_s"], c["predicted_s"]) for c in result["cells"]
                      if c["strategy"] == name and not c["calibrated_on"]], True, number)
        for number, name in enumerate(STRATEGIES)
    ]  # fmt: skip
    points.append(Series("", [(0.25, 0.25), (4.0, 4.0)], False, 5))
    drawn["right"] = chart(
        f"Predicted against measured, {result['held_out']} cells never fitted",
        Axis("measured", seconds, logarithmic=True), Axis("predicted", seconds, logarithmic=True),
        points, "Predicted against measured step times: all points lie near the diagonal.",
    )  # fmt: skip
    gains = []
    for number, name in enumerate(STRATEGIES):
        for kind, real in (("predicted", False), ("measured", True)):
            gains.append(
                Series(
                    name,
                    [(rate, result["doubling"][f"{rate / 1e6:.0f}Mbit-{name}-8 doubled"][kind])
                     for rate in RATES[:-1]],
                    real, number,
                )
            )  # fmt: skip
    drawn["doubling"] = chart(
        "Efficiency gained by doubling the link (8 sequences per rank)",
        Axis("from this rate to twice of it", RATE_AXIS.marks[:-1], logarithmic=True),
        Axis("", [(s / 100, f"{s} %") for s in (-10, 0, 10, 20, 30)]),
        gains, "Efficiency gained by twice the rate, per strategy: largest on slow links.",
    )  # fmt: skip
    return drawn


def page(result: Mapping[str, Any]) -> str:
    cells = result["cells"]

    def best(rate: float, batch: int) -> str:
        mine = [c for c in cells if (c["rate"], c["micro_batch"]) == (rate, batch)]
        one = min(mine, key=lambda c: c["measured_s"])
        return f"{one['strategy']}, {one['measured_s'] * 1e3:.0f} ms"

    rows = [f"| {rate / 1e6:,.0f} Mbit/s | {best(rate, 2)} | {best(rate, 8)} |" for rate in RATES]
    words = {name: value for name, value in result.items() if isinstance(value, (int, float))}
    return TEMPLATE.read_text().format(
        **words,
        cells=len(cells),
        calibrated=len(CALIBRATED_ON),
        rows="\n".join(rows),
        wrong=", ".join(result["ranking_wrong"]) or "none",
        regret=", ".join(f"{rate}: {lost:.1%}" for rate, lost in result["regret_by_rate"].items()),
    )
