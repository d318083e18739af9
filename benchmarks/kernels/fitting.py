"""Fits of a form to rows: coefficients as logarithms, errors as logarithms, sources alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]
Values = Mapping[str, float]
# Seconds of every row, given the coefficients.
Form = Callable[[Values], Numbers]

# A source of many rows counts as much as so many; errors beyond NOISE count linearly.
ROWS_A_SOURCE = 20
NOISE = 0.1


class Prior(NamedTuple):
    """Where a coefficient is expected, how far from there it may be (as a logarithm)."""

    value: float
    spread: float
    low: float = 1e-12
    high: float = 1e12


class Fitted(NamedTuple):
    """Coefficients, and ln(measured / form) of every row."""

    values: dict[str, float]
    off: Numbers


def weights(sources: Sequence[str]) -> Numbers:
    """Of every row: rows count alike in a source, sources by their rows up to ROWS_A_SOURCE."""
    _, which, rows = np.unique(np.asarray(sources), return_inverse=True, return_counts=True)
    weight: Numbers = (np.minimum(rows, ROWS_A_SOURCE) / rows)[which]
    return weight


def fit(form: Form, priors: Mapping[str, Prior], seconds: Numbers, weight: Numbers) -> Fitted:
    """The coefficients of `form` on rows that took `seconds`; rows of no weight are only judged."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # only for fits

    names = list(priors)
    centre = np.log([priors[name].value for name in names])
    spread = np.asarray([priors[name].spread for name in names])
    low = np.log([priors[name].low for name in names])
    high = np.log([priors[name].high for name in names])
    truth = np.log(seconds)
    root = np.sqrt(weight) / NOISE

    def off(logs: Numbers) -> Numbers:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        ratio: Numbers = truth - np.log(form(values))
        return ratio

    def residuals(logs: Numbers) -> Numbers:
        return np.concatenate([_soft(root * off(logs)), (logs - centre) / spread])

    done = least_squares(residuals, centre, bounds=(low, high), x_scale=np.maximum(spread, 1e-3))
    values = dict(zip(names, np.exp(done.x).tolist(), strict=True))
    return Fitted(values, off(done.x))


def _soft(errors: Numbers) -> Numbers:
    """Errors whose squares grow linearly beyond 1, so that no row outvotes the others."""
    square = 2.0 * (np.sqrt(1.0 + errors**2) - 1.0)
    soft: Numbers = np.sign(errors) * np.sqrt(square)
    return soft


def left_out(
    form: Form,
    priors: Mapping[str, Prior],
    seconds: Numbers,
    sources: Sequence[str],
    judged: Callable[[Mask], Mask],
) -> Numbers:
    """ln(measured / form) of each row where its source was not fitted.

    `judged` are the rows that those which stay say something about; the others are not a number.
    """
    names = np.asarray(sources)
    found = np.full(len(seconds), np.nan)
    for name in sorted(set(sources)):
        stays = names != name
        shown = judged(stays)
        if shown.any():
            weight = np.zeros(len(seconds))
            weight[stays] = weights(names[stays].tolist())
            found[shown] = fit(form, priors, seconds, weight).off[shown]
    return found


def spread_of(off: Numbers, weight: Numbers) -> float:
    """Root mean square of ln(measured / form)."""
    return float(np.sqrt(np.average(off**2, weights=weight)))
