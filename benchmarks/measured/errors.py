"""Errors of contributed predictions: tokens/s and peak memory, by device, release and feature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.accuracy import summary
from benchmarks.measured.files import Entry
from shardwise.runs.contribution.record import Contribution


class Errors(NamedTuple):
    """Relative errors of one run's stored prediction; None where one side is unknown."""

    time: float | None
    memory: float | None


def errors_of(run: Contribution) -> Errors:
    predicted, measured = run.predicted, run.measured
    time = memory = None
    if predicted.time is not None and measured.time is not None:
        # Of tokens per second, as for published runs.
        time = measured.time.step_s / predicted.time.step_s - 1
    if predicted.memory is not None and measured.memory is not None:
        memory = predicted.memory.peak_allocated_bytes / measured.memory.peak_allocated_bytes - 1
    return Errors(time, memory)


def features_of(run: Contribution) -> list[str]:
    """What of the engine a run used."""
    strategy, hardware = run.strategy, run.hardware
    present = {
        "hybrid": strategy.hybrid,
        "tensor": strategy.tensor > 1,
        "context": strategy.context > 1,
        "recompute": strategy.recompute != "none",
        "compile": strategy.compile,
        "chunked loss": strategy.loss == "chunked",
        "offload": strategy.offload,
        "adapter": run.adapter is not None,
        "experts": run.model is not None and run.model.experts is not None,
        "several nodes": hardware.nodes > 1,
        "calibrated": hardware.calibrated,
        "traced model": run.model is None,
    }
    return [strategy.kind, *(name for name, used in present.items() if used)]


class Line(NamedTuple):
    """Errors of the runs of one device, release or feature."""

    by: str
    name: str
    runs: int
    sources: int
    time: dict[str, float] | None
    memory: dict[str, float] | None


GROUPINGS: dict[str, Callable[[Contribution], list[str]]] = {
    "device": lambda run: [run.hardware.label],
    "release": lambda run: [run.predicted.shardwise],
    "feature": features_of,
}


def lines(entries: Sequence[Entry]) -> list[Line]:
    """Errors by device, by release that predicted, and by feature."""
    found = []
    for by, names_of in GROUPINGS.items():
        groups: dict[str, list[Entry]] = {}
        for entry in entries:
            for name in names_of(entry.run):
                groups.setdefault(name, []).append(entry)
        found += [_line(by, name, group) for name, group in sorted(groups.items())]
    return found


def _line(by: str, name: str, group: list[Entry]) -> Line:
    errors = [errors_of(entry.run) for entry in group]
    return Line(
        by=by,
        name=name,
        runs=len(group),
        sources=len({entry.source for entry in group}),
        time=_summary(one.time for one in errors),
        memory=_summary(one.memory for one in errors),
    )


def _summary(errors: Iterable[float | None]) -> dict[str, float] | None:
    known = [error for error in errors if error is not None]
    return summary(np.asarray(known)) if known else None


def figures(errors: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Runs, independent sources, median and 90th percentile of (source, error) pairs."""
    known = list(errors)
    found = summary(np.asarray([error for _, error in known]))
    return {
        "runs": len(known),
        "sources": len({source for source, _ in known}),
        "median_error": round(found["median_error"], 6),
        "p90_error": round(found["p90_error"], 6),
    }
