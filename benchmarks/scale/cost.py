"""What a case costs: each in a fresh process, in turn, several times."""

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
    """One case; `runs` has what each round found, and `why` says why there is none."""

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
    """Something that grows.

    `measure` gets a case and returns numbers: seconds under names that end in `_s`, of the CPU
    unless elapsed time is what counts, since machines are shared; megabytes in `_mb`; counts.
    `table` makes the text of the page from all that was found.
    """

    title: str
    cases: Sequence[Case]
    quick: Sequence[Case]
    measure: Callable[..., dict[str, float]]
    table: Callable[[list[Measured]], str]
    rounds: int = 2


def run_part(name: str, part: Part, *, quick: bool) -> list[Measured]:
    """Every case in turn, and that several times, so that a slow minute meets all of them.

    In a hurry cases share a process, whose memory then tells nothing.
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
    """Something that a case needs is not there."""


def _in_child(
    name: str, cases: Sequence[Case]
) -> list[tuple[Case, tuple[list[dict[str, float]], str]]]:
    """Of each case what was found, or why nothing was."""
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
    """Print what the cases cost, or why one could not be measured."""
    found: list[dict[str, float] | str] = []
    for case in cases:
        try:
            measured = part.measure(**case)
            found.append({"peak_mb": memory_mb("VmHWM"), **measured})
        except MissingError as error:
            found.append(str(error))
    print(json.dumps(found))


def elsewhere(function: Callable[..., T], *arguments: Any) -> T:
    """In a process of its own, so that what it needs is not counted here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def cpu_s() -> float:
    """Of this process and of those it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def memory_mb(kind: str) -> float:
    """`VmRSS` now, or `VmHWM` at most; getrusage would count the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def forget_peak() -> float:
    """From here on VmHWM counts anew; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The p of value ~ size^p, by least squares of the logarithms."""
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
    """The median, and the range where it is worth telling."""
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


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
