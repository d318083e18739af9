"""Fit a straight line to times: a fixed number of seconds, and a rate in units per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.spec.record import SpecError

Floats = npt.NDArray[np.float64]

# Sizes of at least this share of the largest determine the rate.
LARGE = 1 / 20
_RESAMPLES = 400


class Line(NamedTuple):
    """Seconds by units: `fixed_s` (α) plus units over `rate` (1/β, units per second).

    `rate_interval` has 95 % probability. `r_squared` is of the line through the large sizes, which
    gives the rate.
    """

    fixed_s: float
    rate: float
    rate_interval: tuple[float, float]
    r_squared: float

    def seconds(self, units: float) -> float:
        return self.fixed_s + units / self.rate


def fit_line(points: Sequence[tuple[float, Sequence[float]]], large_from: float = LARGE) -> Line:
    """The line through `points`: sizes in units, each with the seconds of its repetitions.

    The median of each size counts. Large sizes, of at least `large_from` of the largest, determine
    the rate, and the smallest size the fixed seconds: what a link lets pass at once, and what
    caches hold, bends the curve between them, and one line through all would be wrong at both ends.

    Raises:
        SpecError: Fewer than three sizes are large, or times do not grow with size.
    """
    ordered = sorted(points, key=lambda point: point[0])
    large = [point for point in ordered if point[0] >= large_from * ordered[-1][0]]
    if len(large) < 3 or len({units for units, _ in large}) < 3:
        raise SpecError(
            "calibrate: too few message sizes were measured in time; run it again when the machine "
            "is idle"
        )
    x = np.asarray([units for units, _ in large])
    y = np.asarray([float(np.median(seconds)) for _, seconds in large])
    level, slope = _line(x, y[None, :])
    if slope[0] <= 0:
        raise SpecError(
            "calibrate: times do not grow with size; run it again when the machine is idle"
        )
    off, total = y - (level[0] + slope[0] * x), y - y.mean()
    low, high = np.quantile(_resampled(x, [seconds for _, seconds in large]), (0.025, 0.975))
    units, seconds = ordered[0]
    return Line(
        fixed_s=max(0.0, float(np.median(seconds)) - units * float(slope[0])),
        rate=float(1 / slope[0]),
        rate_interval=(float(1 / high), float(1 / max(low, slope[0] * 1e-3))),
        r_squared=float(1 - (off @ off) / (total @ total)),
    )


def _line(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Intercept and slope of the least-squares line through each row of `y`.

    Errors are weighted relative to `y`.
    """
    weight = 1 / y**2
    mass = weight.sum(axis=1)
    middle_x, middle_y = (weight * x).sum(axis=1) / mass, (weight * y).sum(axis=1) / mass
    away = x - middle_x[:, None]
    slope = (weight * away * (y - middle_y[:, None])).sum(axis=1) / (weight * away**2).sum(axis=1)
    return middle_y - slope * middle_x, slope


def _resampled(x: Floats, repetitions: Sequence[Sequence[float]]) -> Floats:
    """Bootstrap samples of the slope, one per resampling.

    The repetitions of each size are drawn again, with replacement.
    """
    random = np.random.default_rng(0)
    columns = []
    for seconds in repetitions:
        every = np.asarray(seconds, dtype=float)
        drawn = random.integers(0, len(every), (_RESAMPLES, len(every)))
        columns.append(np.median(every[drawn], axis=1))
    return _line(x, np.stack(columns, axis=1))[1]
