"""The figure of docs/accuracy.md: predicted against measured tokens per second."""

from __future__ import annotations

import math
from typing import Any

from shardwise.report.page.chart import Area, Axis, Series, svg_file

NEAR = 1.1


def figure(points: list[dict[str, Any]]) -> str:
    """Predicted against measured tokens per second and device, both on logarithmic axes."""
    marks = _marks([p[key] for p in points for key in ("measured", "predicted")])
    low, high = marks[0][0], marks[-1][0]
    within = [(low, low), (low, low * NEAR), (high / NEAR, high), (high, high), (high, high / NEAR),
              (low * NEAR, low)]  # fmt: skip
    families = sorted({p["family"] for p in points})
    series = [
        Series(f"{family} family", [(p["measured"], p["predicted"]) for p in points
                                    if p["family"] == family], "measured", number, line=False)
        for number, family in enumerate(families)
    ]  # fmt: skip
    return svg_file(
        f"Tokens/s per device, predicted against measured: {len(points)} held-out runs",
        Axis.labelled("measured", marks, True), Axis.labelled("predicted", marks, True),
        [Series("", [(low, low), (high, high)], colour=5), *series],
        "Predicted against measured tokens per second: most points lie near the diagonal.",
        areas=[Area("within 10 %", within)], square=True,
    )  # fmt: skip


def _marks(values: list[float]) -> list[tuple[float, str]]:
    """Axis marks 1, 2, 5, 10 ... that enclose all values."""
    least, most = min(values), max(values)
    found = [
        step * 10.0**power
        for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        for step in (1, 2, 5)
    ]
    low = max(mark for mark in found if mark <= least)
    high = min(mark for mark in found if mark >= most)
    return [(mark, _short(mark)) for mark in found if low <= mark <= high]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
