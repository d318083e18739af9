"""What checks share: the machine, a folder that disappears, deadlines, and runs made once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shardwise.accept import workload
from shardwise.accept.line import CheckFailedError
from shardwise.accept.machine import Machine
from shardwise.accept.ranks import last_words, on_ranks
from shardwise.calibrate.machine.quality import busy_share
from shardwise.child import start_python
from shardwise.contribution.collect import collect
from shardwise.contribution.record import Contribution
from shardwise.runs.find import round_folder
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_cluster
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.step.profile import StepProfile, read_profile
from shardwise.train.compare_strategies import run_once
from shardwise.train.launch import kill_tree

T = TypeVar("T")


class TrainedRun(NamedTuple):
    """A run that was trained, as predicted and as measured. `run` is resolved."""

    run: RunSpec
    predicted: StepProfile
    measured: StepProfile
    last_loss: float
    # Share of the cores that others used, before or after it.
    busy: float
    # What `shardwise contribute` takes; None where a number of it cannot be.
    contribution: Contribution | None = None


class Bench:
    """Runs processes for the checks, until the deadline of the current one."""

    def __init__(self, machine: Machine, folder: Path, say: Callable[[str], None]) -> None:
        self.machine, self.folder, self.say = machine, folder, say
        self.deadline = float("inf")
        self._numbers = count(1)
        self._trained: dict[str, TrainedRun | CheckFailedError] = {}
        self._calibrated: ClusterSpec | CheckFailedError | None = None

    @property
    def trained_runs(self) -> dict[str, TrainedRun]:
        """All runs that finished, by name."""
        return {k: v for k, v in self._trained.items() if isinstance(v, TrainedRun)}

    @property
    def calibrated_cluster(self) -> ClusterSpec | None:
        """What `calibrate` has measured, if it was run."""
        return self._calibrated if isinstance(self._calibrated, ClusterSpec) else None

    def new_folder(self, name: str) -> Path:
        """A path that no other process uses."""
        return self.folder / f"{next(self._numbers)}-{name}"

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def busy_share(self) -> float:
        """Share of all cores that other processes use now."""
        return busy_share()

    def on_ranks(self, function: str, case: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the values of a generator that runs on one rank per device."""
        folder = self.new_folder(function.rpartition(":")[2])
        return on_ranks(function, case, self.machine.processes, folder, self.deadline)

    def command(self, *words: str) -> str:
        """What `shardwise` prints; raises CheckFailedError if it fails or at the deadline."""
        printed: str
        with start_python(
            *("-m", "shardwise", *words),
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                printed, log = process.communicate(timeout=self.seconds_left())
            except subprocess.TimeoutExpired:
                raise CheckFailedError(
                    f"shardwise {words[0]} did not end before the deadline; killed"
                ) from None
            finally:
                if process.poll() is None:
                    kill_tree(process.pid)
        if process.returncode:
            raise CheckFailedError(last_words(log, process.returncode))
        return printed

    def cluster(self) -> ClusterSpec:
        """The devices as the catalogue knows them; if it does not, as `calibrate` measures them."""
        if self.machine.known is None:
            return self.calibrated()
        return ClusterSpec(device=self.machine.known, devices_per_node=self.machine.processes)

    def calibrated(self) -> ClusterSpec:
        """The devices as `shardwise calibrate` measures them; measured once."""
        if self._calibrated is None:
            try:
                self._calibrated = self._calibrate()
            except CheckFailedError as error:
                self._calibrated = error
        return _value(self._calibrated)

    def _calibrate(self) -> ClusterSpec:
        self.say("calibrate")
        file = self.new_folder("cluster").with_suffix(".toml")
        # How busy the machine is, each check judges itself.
        words = ["calibrate", "--force", "--output", str(file)]
        words += ["--nproc", str(self.machine.processes)]
        known = self.machine.known
        if known is not None and not known.is_cpu:
            words += ["--device", known.name]
        self.command(*words)
        return find_cluster(str(file))

    def trained(self, name: str, settings: workload.Settings) -> TrainedRun:
        """The workload, trained once under the layout `name`."""
        if name not in self._trained:
            try:
                self._trained[name] = self._train(name, settings)
            except CheckFailedError as error:
                self._trained[name] = error
        return _value(self._trained[name])

    def _train(self, name: str, settings: workload.Settings) -> TrainedRun:
        run = workload.describe(self.cluster(), settings)
        self.say(f"train {name}")
        before, folder = self.busy_share(), self.new_folder(name)
        found = run_once(run, self.machine.processes, folder, 0, self.seconds_left())
        if isinstance(found, str):
            raise CheckFailedError(f"{name}: {found}")
        try:
            contribution = collect(round_folder(folder, 1))
        except SpecError:
            contribution = None
        try:
            return TrainedRun(
                run=run.resolved(),
                predicted=read_profile(found["predicted"], "predicted"),
                measured=read_profile(found["measured"], "measured"),
                last_loss=float(found["last"]["loss"]),
                busy=max(before, self.busy_share()),
                contribution=contribution,
            )
        except (SpecError, KeyError) as error:
            raise CheckFailedError(f"{name}: {error}") from error


def _value(found: T | CheckFailedError) -> T:
    """What was found; a failure is raised again, also for the checks that come later."""
    if isinstance(found, CheckFailedError):
        raise found
    return found
