"""Break hosts of real runs and count what was survived.

`python -m benchmarks.hosts [--json] [--faults rank-kill,shrink] [--hosts 2,3] [--strategies zero3]
[--moments 25,40] [--lanes 2]` starts runs on network namespaces, injects one fault into each, and
compares the end with a run that was left alone: every byte of the last checkpoint where the same
number of hosts trained, the losses to 1e-6 elsewhere. It needs root. A case takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.hosts.cluster import STRATEGIES, Cluster, cluster, wait_until
from benchmarks.hosts.faults import FAULTS, Fault
from benchmarks.lab.network import available

STEPS = 80
# Steps after which faults happen: between two saves, and while one is written.
MOMENTS = (25, 40)
TOLERANCE = 1e-6


class Case(NamedTuple):
    fault: str
    hosts: int
    strategy: str
    moment: int

    def __str__(self) -> str:
        return f"{self.fault} at step {self.moment}, {self.hosts} hosts, {self.strategy}"


class Outcome(NamedTuple):
    """What came of a fault; times are None where nothing had to be noticed."""

    case: str
    survived: bool
    same_end: bool
    same_size: bool
    # None where nobody is to be blamed.
    blamed_right: bool | None
    noticed_s: float | None
    recovery_s: float | None
    left_over: int
    problem: str = ""


class Reference(NamedTuple):
    state: dict[str, bytes]
    losses: dict[int, float]


def reference(folder: Path, setup: tuple[int, str]) -> Reference:
    """The end of a run that is left alone on a number of hosts with a strategy."""
    hosts, strategy = setup
    with cluster(folder, hosts, strategy, str(hosts), STEPS, serves=False) as run:
        for number in range(hosts):
            run.start(number)
        assert run.ends(), run.said(0)
        return Reference(run.state(), run.losses())


def break_run(folder: Path, case: Case, expected: Reference) -> Outcome:
    """Inject a fault into a run, and compare its end with the expected one."""
    fault = FAULTS[case.fault]
    nodes = f"{case.hosts - 1}:{case.hosts}" if fault.elastic else str(case.hosts)
    serves = not (fault.of_server and fault.restarts)
    count = case.hosts + fault.spare
    with cluster(folder, count, case.strategy, nodes, STEPS, serves) as run:
        for number in range(case.hosts):
            run.start(number)
        started = run.reaches(1)
        if fault.spare:
            run.start(case.hosts)
            # Only a host that waits can take the place of another.
            started = started and wait_until(lambda: "is a spare" in run.said(case.hosts))
        if not started or not run.reaches(case.moment):
            return _failed(case, fault, f"did not start: {run.said(0)[-500:]}")
        victim = 0 if fault.of_server else case.hosts - 1
        noticed_s, recovery_s = _follow(run, fault, victim)
        survived = run.ends() and run.step() == STEPS
        said = {n: run.said(n) for n in range(count)}
        if not survived:
            return _failed(case, fault, "\n".join(f"{n}: {s[-800:]}" for n, s in said.items()))
        blamed = _is_blamed(run, fault, victim)
        same_end = _same_end(run, fault, expected)
        left = len(run.left_over())
    problem = "" if same_end and blamed is not False else "\n".join(s[-800:] for s in said.values())
    return Outcome(
        str(case), True, same_end, fault.same_size, blamed, noticed_s, recovery_s, left, problem
    )


def _failed(case: Case, fault: Fault, problem: str) -> Outcome:
    blamed = False if fault.restarts else None
    return Outcome(str(case), False, False, fault.same_size, blamed, None, None, 0, problem)


def _follow(run: Cluster, fault: Fault, victim: int) -> tuple[float | None, float | None]:
    """Inject a fault; return the seconds until it was noticed, and from then to the same step."""
    import threading

    survivor = 1 if victim == 0 else 0
    step, begin = run.step(), time.monotonic()
    injecting = threading.Thread(target=fault.inject, args=(run, victim))
    injecting.start()
    noticed_s = recovery_s = None
    if fault.restarts and wait_until(lambda: "Restarting" in run.said(survivor)):
        noticed_s = time.monotonic() - begin
        if wait_until(lambda: "Recovered" in run.said(survivor)):
            recovery_s = time.monotonic() - begin - noticed_s
    injecting.join()
    run.reaches(step + 1)
    return noticed_s, recovery_s


def _is_blamed(run: Cluster, fault: Fault, victim: int) -> bool | None:
    """Whether the survivors blame the host of the fault, or nobody where none failed."""
    survivor = 1 if victim == 0 else 0
    lines = [one for one in run.said(survivor).splitlines() if "Blamed: host" in one]
    if not fault.restarts:
        return None if not lines else False
    return bool(lines) and run.hosts[victim].address in lines[0]


def _same_end(run: Cluster, fault: Fault, expected: Reference) -> bool:
    losses = run.losses()
    if fault.same_size:
        return losses == expected.losses and run.state() == expected.state
    return losses.keys() == expected.losses.keys() and all(
        abs(loss / expected.losses[step] - 1) <= TOLERANCE for step, loss in losses.items()
    )


def cases(
    faults: list[str], counts: list[int], strategies: list[str], moments: list[int]
) -> list[Case]:
    """All combinations; faults that last for minutes happen at the first moment only."""
    return [
        Case(fault, hosts, strategy, moment)
        for moment in moments
        for strategy in strategies
        for hosts in counts
        for fault in faults
        if moment == moments[0] or not FAULTS[fault].is_long
    ]


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    same = [one for one in outcomes if one.same_size]
    blamed = [one.blamed_right for one in outcomes if one.blamed_right is not None]
    noticed = sorted(one.noticed_s for one in outcomes if one.noticed_s is not None)
    recovered = [one.recovery_s for one in outcomes if one.recovery_s is not None]
    return {
        "faults": len(outcomes),
        "survived": sum(one.survived for one in outcomes),
        "same_size": len(same),
        "bit_equal": sum(one.same_end for one in same),
        "within_tolerance": sum(one.same_end for one in outcomes if not one.same_size),
        "blamed": len(blamed),
        "blamed_right": sum(blamed),
        "median_recovery_s": median(recovered) if recovered else None,
        "noticed_p90_s": quantiles(noticed, n=10)[-1] if len(noticed) > 1 else None,
        "left_over": sum(one.left_over for one in outcomes),
        "cases": [one._asdict() for one in outcomes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--hosts", default="2,3")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--moments", default=",".join(map(str, MOMENTS)))
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if (reason := available()) is not None:
        sys.exit(reason)
    counts, moments = (
        [int(one) for one in text.split(",")] for text in (asked.hosts, asked.moments)
    )
    chosen = cases(asked.faults.split(","), counts, asked.strategies.split(","), moments)
    keys = list(dict.fromkeys((case.hosts, case.strategy) for case in chosen))
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as parent,
        ProcessPoolExecutor(asked.lanes, get_context("spawn")) as lanes,
    ):
        ends = lanes.map(reference, (Path(parent, f"{n}x{name}") for n, name in keys), keys)
        expected = dict(zip(keys, ends, strict=True))
        folders = (Path(parent, f"run-{number}") for number in range(len(chosen)))
        wanted = (expected[case.hosts, case.strategy] for case in chosen)
        for one in lanes.map(break_run, folders, chosen, wanted):
            outcomes.append(one)
            print(one._replace(problem=""), one.problem, file=sys.stderr, flush=True)
    found = summary(outcomes)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print({key: value for key, value in found.items() if key != "cases"})


if __name__ == "__main__":
    main()
