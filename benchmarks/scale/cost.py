"""Run benchmark cases in new processes, in alternating rounds, and format the results."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
Case = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One case: the results of each round, or in `why` the reason that there are none."""

    case: Case
    runs: list[dict[str, float]]
    why: str = ""

    def __getitem__(self, key: str) -> float:
        """The median."""
        return statistics.median(run[key] for run in self.runs)

    def spread(self, key: str) -> tuple[float, float]:
        values = [run[key] for run in self.runs]
        return min(values), max(values)


class Part(NamedTuple):
    """One part of Shardwise with the cases to measure.

    `measure` takes a case and returns numbers: seconds under names that end in `_s`, megabytes
    under `_mb`, and counts. Seconds are CPU time unless wall-clock time matters, because machines
    are shared. `table` formats all results for the page.
    """

    title: str
    cases: Sequence[Case]
    quick: Sequence[Case]
    measure: Callable[..., dict[str, float]]
    table: Callable[[list[Measured]], str]
    rounds: int = 2


def run_part(name: str, part: Part, *, quick: bool) -> list[Measured]:
    """Measure all cases in several rounds, so that a slow minute affects all of them alike.

    With `quick`, cases share one process, and its memory figures mean nothing.
    """
    if quick:
        return [Measured(case, *found) for case, found in _in_child(name, part.quick)]
    runs: list[list[dict[str, float]]] = [[] for _ in part.cases]
    why = [""] * len(part.cases)
    for number in range(part.rounds):
        order = list(range(len(part.cases)))
        for index in order if number % 2 == 0 else reversed(order):
            if why[index]:
                continue
            ((case, (found, why[index])),) = _in_child(name, [part.cases[index]])
            runs[index] += found
            print(f"{name} {dict(case)}: {why[index] or found[0]}", file=sys.stderr, flush=True)
    return [Measured(*one) for one in zip(part.cases, runs, why, strict=True)]


class MissingError(Exception):
    """A file that a case needs is missing."""


def _in_child(
    name: str, cases: Sequence[Case]
) -> list[tuple[Case, tuple[list[dict[str, float]], str]]]:
    """Measure cases in one child process; return for each its results or why it has none."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", name, json.dumps(list(cases))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        (case, ([], one) if isinstance(one, str) else ([one], ""))
        for case, one in zip(cases, found, strict=True)
    ]


def child(part: Part, cases: Sequence[Case]) -> None:
    """Measure cases and print, as JSON, the results of each or why it has none."""
    found: list[dict[str, float] | str] = []
    for case in cases:
        try:
            measured = part.measure(**case)
            found.append({"peak_mb": memory_mb("VmHWM"), **measured})
        except MissingError as error:
            found.append(str(error))
    print(json.dumps(found))


def in_subprocess(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a separate process, so that its memory and time are not counted here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def cpu_s() -> float:
    """CPU time of this process and of the children it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def memory_mb(kind: str) -> float:
    """Resident memory: `VmRSS` now, `VmHWM` at the peak; getrusage would include the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def reset_peak() -> float:
    """Reset VmHWM and return the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit p in value ~ size^p, by least squares of the logarithms."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope


# ---- text ---------------------------------------------------------------------------------------


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * factor:
            return f"{_two_digits(value / factor)} {unit}"
    return f"{_two_digits(value / 1e-6)} µs"


def timed(one: Measured, key: str) -> str:
    """The median, and the range if it is wider than a tenth."""
    low, high = one.spread(key)
    if len(one.runs) < 2 or high < 1.1 * low:
        return seconds(one[key])
    return f"{seconds(one[key])} ({seconds(low)} to {seconds(high)})"


def size(value: float) -> str:
    """Bytes, in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{_two_digits(value / factor)} {unit}"
    return f"{value:.0f} B"
