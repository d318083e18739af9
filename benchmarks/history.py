"""Benchmark history: one JSON line per run, and the trend of every figure.

    python -m benchmarks.history record startup plan_speed   # run them, append a line each
    python -m benchmarks.history show                        # trend; exits with 1 if one is flagged

A line holds the benchmark, date, commit, machine, Python and torch, and every number that the
benchmark printed with --json. Only lines of the same machine are compared. A figure is flagged when
its last value lies outside the spread of the runs before: their median, plus or minus three times
the median absolute deviation (scaled to a standard deviation), and at least 2 % of the median. A
figure needs at least five earlier runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HISTORY = Path(__file__).with_name("history.jsonl")
LEAST_RUNS = 5
DEVIATIONS = 3.0
# Makes the median absolute deviation of normally distributed values a standard deviation.
NORMAL = 1.4826
LEAST_SPREAD = 0.02


class Trend(NamedTuple):
    """One figure of one benchmark over its runs on one machine, oldest first."""

    benchmark: str
    figure: str
    values: list[float]

    @property
    def earlier(self) -> list[float]:
        return self.values[:-1]

    @property
    def spread(self) -> tuple[float, float] | None:
        """The range in which the last value is expected; None while there are too few runs."""
        if len(self.earlier) < LEAST_RUNS:
            return None
        middle = statistics.median(self.earlier)
        deviation = statistics.median(abs(value - middle) for value in self.earlier)
        half = max(DEVIATIONS * NORMAL * deviation, LEAST_SPREAD * abs(middle))
        return middle - half, middle + half

    @property
    def flagged(self) -> bool:
        spread = self.spread
        return spread is not None and not spread[0] <= self.values[-1] <= spread[1]


def numbers(found: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a benchmark's JSON under its dotted name; lists and texts are left out."""
    if isinstance(found, bool):
        return
    if isinstance(found, int | float):
        yield name, float(found)
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from numbers(value, f"{name}.{key}" if name else str(key))


def machine() -> str:
    """Processor model and number of cores: only timings with the same value are compared."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        model = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores"


def record(benchmark: str, history: Path) -> dict[str, Any]:
    """Run one benchmark and append its line."""
    script = Path(__file__).with_name(f"{benchmark}.py")
    if not script.is_file():
        sys.exit(f"no benchmark {benchmark!r}: give the name of a file in benchmarks/")
    done = subprocess.run(
        [sys.executable, str(script), "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{benchmark} failed with exit code {done.returncode}; nothing was recorded")
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "unknown",
        "machine": machine(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "figures": dict(numbers(json.loads(done.stdout))),
    }
    with history.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def trends(lines: Sequence[dict[str, Any]], where: str) -> list[Trend]:
    """Every figure measured on the machine `where`, in the order of its first run."""
    collected: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        if line["machine"] == where:
            for figure, value in line["figures"].items():
                collected.setdefault((line["benchmark"], figure), []).append(value)
    return [Trend(*names, values) for names, values in collected.items()]


def show(history: Path) -> int:
    """Print the trend of every figure; 1 if one is flagged."""
    if not history.is_file():
        sys.exit(f"no history in {history.name}: start one with `record startup`")
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    where = machine()
    rows = trends(lines, where)
    print(f"{len(lines)} runs recorded; measured on {where}")
    print(f"{'benchmark':<12} {'figure':<32} {'runs':>4} {'last':>10}  expected")
    for row in rows:
        spread = row.spread
        expected = f"{spread[0]:.4g} to {spread[1]:.4g}" if spread else "too few runs"
        flag = "  OUT OF SPREAD" if row.flagged else ""
        print(
            f"{row.benchmark:<12} {row.figure:<32} {len(row.values):>4} {row.values[-1]:>10.4g}  "
            f"{expected}{flag}"
        )
    return int(any(row.flagged for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--history", type=Path, default=HISTORY, help="path of the JSON-lines file")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run benchmarks and append a line for each")
    recording.add_argument("benchmarks", nargs="+", help="names of files in benchmarks/")
    commands.add_parser("show", help="print the trend of every figure")
    options = parser.parse_args()
    if options.command == "show":
        sys.exit(show(options.history))
    for benchmark in options.benchmarks:
        line = record(benchmark, options.history)
        print(f"{benchmark}: {len(line['figures'])} figures recorded")


if __name__ == "__main__":
    main()
