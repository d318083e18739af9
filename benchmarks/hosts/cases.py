"""One fault of a host in a real run, and what came of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.hosts.cluster import Cluster, cluster, wait_until
from benchmarks.hosts.faults import FAULTS, JOINED, Fault

STEPS = 40
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
    # Listening sockets that nobody asked for, before the fault and after the end.
    open_ports: int
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
        run.step_s = fault.step_s
        for number in range(count):
            run.start(number)
        if not run.wait_for_step(1):
            return _failed(case, fault, f"did not start: {run.said(0)[-500:]}")
        # Looked up before the moment of the fault: the run would go on meanwhile, and may end.
        ports = run.unexpected_ports()
        trains = [number for number in range(count) if run.ranks(number)]
        victim, survivor = (0, 1) if fault.of_server else (trains[-1], trains[0])
        if not run.wait_for_step(case.moment):
            return _failed(case, fault, f"did not train: {run.said(0)[-500:]}")
        noticed_s, recovery_s = _follow(run, fault, victim, survivor)
        survived = run.ends() and run.step() == STEPS
        said = {n: run.said(n) for n in range(count)}
        joined = not fault.joins or JOINED in said[survivor]
        if not survived or not joined:
            return _failed(case, fault, "\n".join(f"{n}: {s[-800:]}" for n, s in said.items()))
        blamed = _is_blamed(run, fault, victim, survivor)
        same_end = _same_end(run, fault, expected)
        left = run.left_over()
        ports += run.unexpected_ports()
    told = [] if same_end and blamed is not False else [text[-800:] for text in said.values()]
    return Outcome(
        str(case),
        True,
        same_end,
        fault.same_size,
        blamed,
        noticed_s,
        recovery_s,
        len(left),
        len(ports),
        "\n".join([*told, *left, *ports]),
    )


def _failed(case: Case, fault: Fault, problem: str) -> Outcome:
    blamed = False if fault.restarts else None
    return Outcome(str(case), False, False, fault.same_size, blamed, None, None, 0, 0, problem)


def _follow(
    run: Cluster, fault: Fault, victim: int, survivor: int
) -> tuple[float | None, float | None]:
    """Inject a fault; return the seconds until it was noticed, and those of the recovery.

    The recovery ends when the step of the fault is complete. It begins when the fault is noticed,
    or is over if the run needs that host.
    """
    step, begin = run.step(), time.monotonic()
    over: list[float] = []

    def inject() -> None:
        fault.inject(run, victim)
        over.append(time.monotonic())

    injecting = threading.Thread(target=inject)
    injecting.start()
    noticed_s = recovered = None
    if fault.restarts and wait_until(lambda: "Restarting" in run.said(survivor)):
        noticed_s = time.monotonic() - begin
        if wait_until(lambda: "Recovered" in run.said(survivor)):
            recovered = time.monotonic()
    injecting.join()
    run.wait_for_step(step + 1)
    if noticed_s is None or recovered is None:
        return noticed_s, None
    can_begin = begin + noticed_s if fault.elastic else max(begin + noticed_s, over[0])
    return noticed_s, recovered - can_begin


def _is_blamed(run: Cluster, fault: Fault, victim: int, survivor: int) -> bool | None:
    """Whether a survivor blames the host of the fault, or nobody where none failed."""
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
