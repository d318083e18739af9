"""Published runs with tensor and context parallelism: what they were given, what was measured.

The tables lie in benchmarks/data/multidim. A prediction is made from a
`Layout` alone. It never sees `Measured`.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.validation import FOLDER
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy

TABLES = FOLDER / "multidim"
GIB = 2.0**30

Numbers = npt.NDArray[np.floating[Any]]


class Layout(NamedTuple):
    """The inputs of a prediction: shape, strategy and nodes."""

    model: ModelSpec
    seq_len: int
    strategy: Strategy
    nodes: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that the devices of a tensor and context group share."""
        return self.strategy.micro_batch * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.strategy.accumulate * self.strategy.data_parallel


class Measured(NamedTuple):
    """What a source published of a run; None where it did not."""

    step_s: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of a table."""

    id: str
    split: str
    layout: Layout
    # None of a run that crashed or ran out of memory.
    measured: Measured | None


def read_table(name: str) -> Iterator[dict[str, str]]:
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def llama(**shape: int | bool) -> ModelSpec:
    """A model of the Llama family from its shape."""
    shape.setdefault("kv_heads", shape["heads"])
    shape.setdefault("head_dim", shape["hidden"] // shape["heads"])
    return ModelSpec.read({"family": "llama", **shape})


# ---- errors ---------------------------------------------------------------------------------


def summary(errors: Numbers) -> dict[str, float]:
    size = np.abs(errors)
    return {
        "rows": len(size),
        "median_error": float(np.median(size)),
        "mean_error": float(size.mean()),
        "p90_error": float(np.quantile(size, 0.9)),
        "max_error": float(size.max()),
        "bias": float(np.median(errors)),
    }


def throughput_errors(runs: Sequence[Run], step_s: Numbers) -> Numbers:
    """Relative errors of tokens per second."""
    measured = np.asarray([run.measured.step_s for run in runs if run.measured])
    errors: Numbers = measured / step_s - 1.0
    return errors


def memory_errors(runs: Sequence[Run], memory_bytes: Numbers) -> Numbers:
    measured = np.asarray([run.measured.memory_bytes for run in runs if run.measured])
    errors: Numbers = memory_bytes / measured - 1.0
    return errors


# ---- choosing -------------------------------------------------------------------------------


def chosen(step_s: Sequence[float], rng: random.Random) -> int:
    """The run predicted fastest; one at random of those predicted equally fast.

    Tables may be sorted by what was measured, so the first of equal ones would leak it.
    """
    least = min(step_s)
    return rng.choice([number for number, value in enumerate(step_s) if value == least])


def regret(
    runs: Sequence[Run],
    step_s: Numbers,
    grid: Callable[[Run], object],
    draws: int = 50,
    least: int = 5,
) -> list[float]:
    """Throughput lost by choosing the run predicted fastest, per grid of at least `least` runs."""
    rng = random.Random(0)
    grids: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        grids.setdefault(grid(run), []).append(number)
    lost = []
    for numbers in grids.values():
        if len(numbers) < least:
            continue
        measured = [_step(runs[number]) for number in numbers]
        predicted = [float(step_s[number]) for number in numbers]
        best = min(measured)
        drawn = [1.0 - best / measured[chosen(predicted, rng)] for _ in range(draws)]
        lost.append(float(np.mean(drawn)))
    return lost


def _step(run: Run) -> float:
    assert run.measured is not None
    assert run.measured.step_s is not None
    return run.measured.step_s
