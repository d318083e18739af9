"""What the gate costs: CPU time of each folder of tests, beside a budget that a change must keep.

Seconds of one machine mean nothing on another, so CPU time is counted in units: the CPU time of a
fixed piece of work, timed many times during the same run. `pytest -n 2 --cpu FOLDER` writes what
each worker has used, with all the processes that its tests have started: those that it has waited
for, those that still run, and those whose parent ended first, which tests/reaper.py waits for.

    python -m tests.budget check FOLDER    a table; fails above 1.5 times a budget
    python -m tests.budget set FOLDER      writes .ci/budget.toml anew, with room of 20 %; what the
                                           run did not have keeps its budget
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import suppress
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / ".ci" / "budget.toml"
REAPER = ROOT / "tests" / "reaper.py"
FAILS_ABOVE = 1.5
ROOM = 1.2
# Below this many units all is noise: no budget is smaller.
SMALLEST = 5
# The piece of work is timed once for as much CPU time of tests.
TIMED_EVERY_S = 30.0
STARTED = "starting and collecting"


def own_seconds() -> float:
    """CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def used_by(process: psutil.Process) -> float:
    """CPU time of a process that may have ended, and of those that it has waited for."""
    with suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])
    return 0.0


def cpu_seconds() -> float:
    """CPU time of this worker and of every process that its tests have started so far."""
    reaper = psutil.Process(os.getppid())
    before, waited_for = None, used_by(reaper)
    while waited_for != before:  # else a process has passed from the living to the reaper
        living = [one for one in reaper.children(recursive=True) if one.pid != os.getpid()]
        seconds = own_seconds() + waited_for + sum(map(used_by, living))
        before, waited_for = waited_for, used_by(reaper)
    return seconds


def piece_of_work() -> float:
    """CPU seconds of what tests are made of: starting a process, Python objects, and numpy."""
    import numpy as np

    start = own_seconds()
    subprocess.run([sys.executable, "-I", "-c", "import json, numpy"], check=True)
    words = [f"{number * 7919 % 10007:05d}" for number in range(40_000)]
    counted = Counter(word[:3] for word in sorted(words))
    json.loads(json.dumps(counted))
    square = np.arange(160_000, dtype=np.float64).reshape(400, 400) / 160_000
    for _ in range(20):
        square = np.sqrt(square * square + 1.0)
    return own_seconds() - start


def write_usage(folder: Path, pieces: list[float], tests: dict[str, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = {"pieces": pieces, "tests": tests}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(written))


class Reapers:
    """A plugin of the process that starts the workers: makes each the child of a reaper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        for spec in specs:
            spec.python = shlex.join([sys.executable, str(REAPER), sys.executable])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        used = os.times()
        write_usage(self.folder, [], {STARTED: used.user + used.system})


class Recorder:
    """A plugin of a worker: CPU seconds of each test, written to a folder when the session ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tests: dict[str, float] = {}
        self.pieces = [piece_of_work()]
        self.counted: float | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        # What lies between two tests belongs to the second: reading it twice would cost more.
        start = cpu_seconds() if self.counted is None else self.counted
        done = yield
        self.counted = cpu_seconds()
        self.tests[item.nodeid] = self.counted - start
        if sum(self.tests.values()) > len(self.pieces) * TIMED_EVERY_S:
            self.pieces.append(piece_of_work())
            self.counted += self.pieces[-1]
        return done

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        rest = cpu_seconds() - sum(self.tests.values()) - sum(self.pieces)
        write_usage(self.folder, self.pieces, {**self.tests, STARTED: rest})


def record(config: pytest.Config, folder: Path) -> None:
    """Have pytest write CPU times to the folder."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(folder))
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(Reapers(folder))
    else:
        raise pytest.UsageError("--cpu counts the CPU time of workers: add --numprocesses 1")


def folder_of(test: str) -> str:
    """The folder whose budget pays for a test; a file beside the folders counts as one."""
    return "/".join(test.partition("::")[0].split("/")[:2])


class Usage(NamedTuple):
    """What a run has used: CPU seconds of each test, and of one piece of work."""

    tests: dict[str, float]
    piece: float

    def folders(self) -> dict[str, float]:
        """Units of each folder of tests."""
        units: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self.tests.items():
            units[folder_of(name)] += seconds / self.piece
        return dict(units)


def read_usage(folder: Path) -> Usage:
    """Join what all workers of a run have written."""
    written = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not written:
        raise SystemExit(f"{folder} holds no CPU times: run pytest --cpu {folder}")
    tests: defaultdict[str, float] = defaultdict(float)
    for one in written:
        for name, seconds in one["tests"].items():
            tests[name] += seconds
    return Usage(dict(tests), median(piece for one in written for piece in one["pieces"]))


def read_budgets() -> dict[str, float]:
    return {
        name: float(units) for name, units in tomllib.loads(BUDGETS.read_text())["units"].items()
    }


class Verdict(NamedTuple):
    """Folders above their budget, and among them those that fail."""

    above: list[str]
    fails: list[str]


def judge(used: dict[str, float], budgets: dict[str, float]) -> Verdict:
    """Compare with the budgets; a folder that has none fails."""
    shares = {name: units / budgets[name] if name in budgets else inf
              for name, units in used.items()}  # fmt: skip
    above = [name for name, share in shares.items() if share > 1]
    return Verdict(above, [name for name in above if shares[name] > FAILS_ABOVE])


def table(usage: Usage, budgets: dict[str, float]) -> str:
    used = usage.folders()
    fails = judge(used, budgets).fails
    lines = [f"{'folder':<28}{'units':>8}{'budget':>8}{'CPU s':>8}"]
    for name, units in sorted(used.items(), key=lambda item: -item[1]):
        budget = budgets.get(name, 0)
        mark = "  FAILS" if name in fails else "  above" if units > budget else ""
        lines.append(f"{name:<28}{units:>8.0f}{budget:>8.0f}{units * usage.piece:>8.0f}{mark}")
    total = sum(used.values())
    budget = sum(budgets.get(name, 0) for name in used)
    lines.append(f"{'all':<28}{total:>8.0f}{budget:>8.0f}{total * usage.piece:>8.0f}")
    lines.append(f"One unit took {usage.piece:.3f} CPU seconds in this run.")
    return "\n".join(lines)


def check(folder: Path) -> int:
    """Print the table; 1 where a folder is far above its budget or has none."""
    usage, budgets = read_usage(folder), read_budgets()
    verdict = judge(usage.folders(), budgets)
    print(table(usage, budgets))
    for name in verdict.above:
        longest = sorted(
            (seconds / usage.piece, test)
            for test, seconds in usage.tests.items()
            if folder_of(test) == name
        )
        print(f"{name} is above its budget. Its longest tests, in units:")
        print("\n".join(f"  {units:6.0f}  {test}" for units, test in longest[:-6:-1]))
    if verdict.fails:
        print(
            f"Failed: {', '.join(verdict.fails)}: more than {FAILS_ABOVE} times the budget. "
            "Make the tests cheaper or mark long ones nightly; where their cost is worth it, "
            f"raise the budget in {BUDGETS.relative_to(ROOT)} and say why in the commit."
        )
    return 1 if verdict.fails else 0


def write(folder: Path) -> int:
    """Write the budget file anew from a finished run; what it did not run keeps its budget."""
    used = read_usage(folder).folders()
    budgets = {name: units for name, units in read_budgets().items() if (ROOT / name).exists()}
    budgets |= {name: max(SMALLEST, ceil(units * ROOM)) for name, units in used.items()}
    lines = [f'"{name}" = {units:.0f}' for name, units in sorted(budgets.items())]
    head = BUDGETS.read_text().partition("[units]")[0]
    BUDGETS.write_text("\n".join([f"{head}[units]", *lines, ""]))
    print(f"{BUDGETS.relative_to(ROOT)}: {len(lines)} folders")
    return 0


if __name__ == "__main__":
    commands = {"check": check, "set": write}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]](Path(sys.argv[2])))
