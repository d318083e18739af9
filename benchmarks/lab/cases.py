"""Train the cases of an experiment on the same hosts, in several rounds.

Each round runs every case once, in random order, so that other load on the machine affects all of
them alike. Each job ends with two profiled steps, which give the exposed communication.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.lab.baseline import spread, write_run_toml
from benchmarks.lab.network import BURST_S, QUEUE_S, hosts, set_rate
from benchmarks.lab.quiet import BUSY, usage, wait_until_quiet
from benchmarks.lab.session import Session
from shardwise.observe.observation import Observation, step_shares, units_of
from shardwise.observe.summary import summarise
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_cluster
from shardwise.spec.run import RunSpec, read_run

HOSTS, RANKS_PER_HOST = 2, 2
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 4096}
SEQ_LEN = 128
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "zero2": {"kind": "zero2"},
    "zero3": {"kind": "zero3"},
    "hybrid": {"kind": "zero3", "shard": 2, "replicate": 2},
}
# The first steps allocate and choose buckets; the last two are profiled.
WARM_UP, PLAIN, PROFILED = 2, 10, 2
ROUNDS = 2
RESULTS = Path(__file__).parent / "results"
# The cluster as measured by `shardwise calibrate` on the hosts.
CLUSTER = RESULTS / "cluster.toml"


class Case(NamedTuple):
    """One configuration at one link rate, on a number of hosts and ranks per host."""

    name: str
    rate: float | None
    strategy: Mapping[str, Any]
    model: Mapping[str, Any] = MODEL
    hosts: int = HOSTS
    ranks: int = RANKS_PER_HOST
    # Whether to measure memory instead of profiling steps, and whether to profile any.
    weighed: bool = False
    profiled: bool = True
    plain: int = PLAIN
    rounds: int = ROUNDS
    # Burst allowance and queue of the links.
    burst_s: float = BURST_S
    queue_s: float = QUEUE_S
    # Further settings of `train`.
    train: Mapping[str, Any] = MappingProxyType({})

    def write(self, file: Path) -> Path:
        """Write its run.toml. The ranks of a host share its link, and `network` is per rank."""
        first = WARM_UP + self.plain
        last = first + (PROFILED + 1 if self.profiled else 0)
        train: dict[str, Any] = {**self.train, "steps": last, "log_every": 1000}
        if self.weighed:
            train |= {"measure": True, "log_every": 1}
        elif self.profiled:
            train["profile"] = {"after": first, "steps": PROFILED, "keep": 0}
        per_rank = self.rate / self.ranks if self.rate else None
        return write_run_toml(
            file, self.strategy, self.hosts, self.ranks, per_rank, train, self.model, SEQ_LEN
        )

    def run(self, measured: ClusterSpec | None = None) -> RunSpec:
        """The run to predict, on the cluster that `shardwise calibrate` measured."""
        with tempfile.TemporaryDirectory() as place:
            run = read_run(self.write(Path(place, "run.toml")))
        known = measured or find_cluster(str(CLUSTER))
        sizes = {"nodes": self.hosts, "devices_per_node": self.ranks}
        cluster = known.but(network=run.cluster.network, **sizes)
        return run._replace(cluster=cluster).resolved()

    def observe(self, found: Mapping[str, Any], measured: ClusterSpec | None = None) -> Observation:
        """Its results as an observation for calibration."""
        run = self.run(measured)
        step = float(found["median_s"])
        share = found.get("exposed_share")
        exposed = None if share is None else float(share) * step
        compute = None if exposed is None else step - exposed
        return Observation(run, units_of(run), step, compute, exposed)


@dataclass
class Kept:
    """Results of one case over all rounds."""

    rounds: int = 0
    step_s: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    # Share of the machine that other processes used meanwhile, by round.
    others: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {**spread(self.step_s), "rounds": self.rounds}
        if self.others:
            found["others_share"] = max(self.others)
        if self.exposed:
            found["exposed_share"] = statistics.median(self.exposed)
        if self.peak_bytes:
            found["peak_bytes"] = int(statistics.median(self.peak_bytes))
            found["loss"] = self.loss
        return found


def measure_cases(
    cases: Sequence[Case], keep_as: str | None = None, patience_s: float = 0.0
) -> dict[str, Kept]:
    """Train all cases; with `keep_as`, save the results under that name after every round.

    For `patience_s` in all, jobs wait until other processes use little of the machine, and those
    that were disturbed are trained again.
    """
    until = time.monotonic() + patience_s
    kept = {case.name: Kept() for case in cases}
    layouts = dict.fromkeys((case.hosts, case.ranks) for case in cases)
    for count, ranks in layouts:
        mine = [case for case in cases if (case.hosts, case.ranks) == (count, ranks)]
        with tempfile.TemporaryDirectory() as place, hosts(count, None, "cases") as made:
            folder = Path(place)
            with Session(made, ranks, folder / "session") as session:
                for number in range(max(case.rounds for case in mine)):
                    order = [case for case in mine if number < case.rounds]
                    random.Random(number).shuffle(order)
                    for case in order:
                        set_rate(made, case.rate, case.burst_s, case.queue_s)
                        where = folder / f"{number}-{case.name}"
                        _train_undisturbed(case, session, where, kept[case.name], until)
                    if keep_as is not None:
                        save(keep_as, kept)
    return kept


def _train_undisturbed(
    case: Case, session: Session, folder: Path, kept: Kept, until: float
) -> None:
    """Train a job, and again while others disturb it and there is time."""
    now = partial(usage, session.hosts)
    attempt = 0
    while True:
        wait_until_quiet(now, until)
        before, tried = now(), deepcopy(kept)
        _train(case, session, folder.with_name(f"{folder.name}-{attempt}"), tried)
        others, attempt = now().others(before), attempt + 1
        print(f"others used {others:.0%} of the machine", file=sys.stderr, flush=True)
        if others <= BUSY or time.monotonic() >= until:
            tried.others.append(others)
            vars(kept).update(vars(tried))
            return


def _train(case: Case, session: Session, folder: Path, kept: Kept) -> None:
    outcome = session.run(case.write(folder.with_suffix(".toml")), folder)
    if not outcome.ok:
        raise RuntimeError(f"{case.name}: {outcome.error}")
    kept.rounds += 1
    kept.step_s.extend(outcome.step_s[0 if case.weighed else WARM_UP :])
    kept.loss[:] = [line["loss"] for line in outcome.metrics if "loss" in line]
    traces = sorted(folder.glob("traces/step-*/*.json.gz"))
    if traces:
        kept.exposed.append(step_shares(summarise(traces))[1])
    if outcome.measured and "memory" in outcome.measured:
        kept.peak_bytes.append(outcome.measured["memory"]["peak_allocated_bytes"])
    median = statistics.median(outcome.step_s)
    print(f"{folder.name} {median * 1e3:.0f} ms", file=sys.stderr, flush=True)


def save(name: str, kept: Mapping[str, Kept]) -> None:
    cases = {case: mine.summary() for case, mine in kept.items() if mine.step_s}
    save_as(name, {"kind": "measured", "cases": cases})


def save_as(name: str, result: Mapping[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def load(name: str) -> dict[str, Any] | None:
    """Saved results of an experiment; None if it was never run."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    return found
