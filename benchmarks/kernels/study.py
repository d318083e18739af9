"""One kernel on one device: its rows, the fitted coefficients and how far they are off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.kernels.fitting import (
    Fitted,
    Form,
    Mask,
    Numbers,
    Prior,
    fit,
    left_out,
    spread_of,
    weights,
)
from benchmarks.kernels.tables import Row

# Coefficients are written with so many significant digits.
DIGITS = 3
# Fewer rows, or fewer different sizes, say nothing about a form of two coefficients.
LEAST_ROWS = 4
LEAST_SIZES = 3
LEAST_RANGE = 3.0


class Key(NamedTuple):
    """What an entry is called."""

    device: str
    family: str
    kernel: str
    dtype: str


class Study(NamedTuple):
    """An entry of the catalogue, and ln(measured / form) of its rows."""

    key: Key
    entry: dict[str, Any]
    off: Numbers
    # Where the row's source was left out of the fit; not a number where the rest is too few.
    left_out: Numbers
    sources: tuple[str, ...]


class Skipped(NamedTuple):
    """Rows whose form cannot be identified, and why."""

    key: Key
    rows: int
    reason: str


Result = Study | Skipped


class Problem(NamedTuple):
    """What is fitted: rows, their seconds, a form, and what to write beside its coefficients."""

    rows: Sequence[Row]
    seconds: Numbers
    form: Form
    priors: Mapping[str, Prior]
    # The quantity that the form depends on.
    sizes: Numbers
    peak: float
    constants: dict[str, Any]
    # A second quantity of the form, such as the ranks of a group.
    levels: Numbers | None = None
    # Rows that a factor concerns, by its name: of a head size, of the backward.
    concerns: Mapping[str, Mask] = MappingProxyType({})

    def judged(self, stays: Mask) -> Mask:
        """The other rows that these alone say something about.

        None where they do not identify the form; not those of a factor that nobody else measured.
        """
        found: Mask = ~stays
        levels = self.levels
        one_level = levels is not None and len(set(levels)) > 1 and len(set(levels[stays])) < 2
        if one_level or too_few(self.sizes[stays]):
            return np.zeros_like(found)
        for concerned in self.concerns.values():
            if not (concerned & stays).any():
                found &= ~concerned
        return found


def grouped(rows: Sequence[Row], key: Callable[[Row], Key | None]) -> dict[Key, list[Row]]:
    """Rows by what their entry is called; those without a key are left out."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        named = key(row)
        if named is not None:
            found.setdefault(named, []).append(row)
    return dict(sorted(found.items()))


def too_few(sizes: Numbers) -> str:
    """Why rows of such sizes do not identify two coefficients; nothing where they do."""
    if len(sizes) < LEAST_ROWS:
        return "1 row" if len(sizes) == 1 else f"{len(sizes)} rows"
    different = np.unique(sizes)
    if len(different) < LEAST_SIZES:
        return "one size" if len(different) == 1 else f"{len(different)} sizes"
    if different[-1] < LEAST_RANGE * different[0]:
        return f"sizes within a factor of {different[-1] / different[0]:.1f}"
    return ""


def solve(key: Key, problem: Problem) -> Study:
    """Fit one entry, and once more without each of its sources."""
    sources = [row.source for row in problem.rows]
    weight = weights(sources)
    fitted = fit(problem.form, problem.priors, problem.seconds, weight)
    out = left_out(problem.form, problem.priors, problem.seconds, sources, problem.judged)
    entry = _entry(key, problem, fitted, weight)
    shown = np.isfinite(out)
    if shown.any():
        entry["left_out"] = round(spread_of(out[shown], weight[shown]), 3)
    return Study(key, entry, fitted.off, out, tuple(sources))


def _entry(key: Key, problem: Problem, fitted: Fitted, weight: Numbers) -> dict[str, Any]:
    counted = Counter(row.source for row in problem.rows)
    values = {name: rounded(value) for name, value in fitted.values.items()}
    sizes = problem.sizes
    return {
        "kernel": key.kernel,
        "dtype": key.dtype,
        "peak": problem.peak,
        **problem.constants,
        **values,
        "spread": round(spread_of(fitted.off, weight), 3),
        "fitted": [_size(float(sizes.min())), _size(float(sizes.max()))],
        "rows": len(problem.rows),
        "sources": sorted(counted),
    }


def rounded(value: float) -> float:
    """To the digits that are written."""
    return float(f"{value:.{DIGITS}g}")


def _size(value: float) -> float:
    """Tokens as they are, FLOPs and bytes in three digits."""
    return value if value < 1e6 else rounded(value)
