"""Coefficients of a stack, fitted to measured runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from benchmarks.multidim.rows import Numbers

# A NamedTuple of positive numbers.
Stack = TypeVar("Stack", bound=tuple[float, ...])
# Weight of the start against one run: only what no run tells stays there.
PRIOR_WEIGHT = 0.05
# Log errors beyond this count less and less: a few runs met troubles that no input tells.
OUTLIER = 0.05


def fit(start: Stack, predict: Callable[[Stack], Numbers], measured: Numbers) -> Stack:
    """Least squares of log errors, robust against outliers, with a weak prior at `start`."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # only for fits

    truth, prior = np.log(measured), np.log(np.asarray(start))
    kind: Any = type(start)

    def residuals(packed: Numbers) -> Numbers:
        found = np.log(predict(kind(*np.exp(packed)))) - truth
        return np.concatenate([found, PRIOR_WEIGHT * (packed - prior)])

    done = least_squares(residuals, prior, loss="soft_l1", f_scale=OUTLIER, x_scale="jac")
    fitted: Stack = kind(*(float(value) for value in np.exp(done.x)))
    return fitted
