"""What checks share: the machine, a folder, deadlines, and runs that are trained only once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shardwise.runs.contribution.collect import collect
from shardwise.runs.contribution.record import Contribution
from shardwise.runs.find import round_folder
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_cluster
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.step.profile import StepProfile, read_profile
from shardwise.trainer.api import run_command
from shardwise.trials.accept import workload
from shardwise.trials.accept.line import CheckFailedError
from shardwise.trials.accept.machine import Machine
from shardwise.trials.accept.ranks import last_words, on_ranks
from shardwise.trials.calibrate.machine.quality import busy_share
from shardwise.trials.compare_strategies import run_once

T = TypeVar("T")


class TrainedRun(NamedTuple):
    """A run that was trained, with its prediction and measurement. `run` is resolved."""

    run: RunSpec
    predicted: StepProfile
    measured: StepProfile
    last_loss: float
    # Share (0 to 1) of the cores in use just before or after the run, the larger one.
    busy: float
    # The run as `shardwise contribute` would send it; None if it cannot be.
    contribution: Contribution | None = None


class Bench:
    """Runs processes for the checks, until the deadline of the current check.

    `deadline` is of the monotonic clock.
    """

    def __init__(self, machine: Machine, folder: Path, say: Callable[[str], None]) -> None:
        self.machine, self.folder, self.say = machine, folder, say
        self.deadline = float("inf")
        self._numbers = count(1)
        self._trained: dict[str, TrainedRun | CheckFailedError] = {}
        self._calibrated: ClusterSpec | CheckFailedError | None = None

    @property
    def trained_runs(self) -> dict[str, TrainedRun]:
        """All runs that finished, by name of the layout."""
        return {k: v for k, v in self._trained.items() if isinstance(v, TrainedRun)}

    @property
    def calibrated_cluster(self) -> ClusterSpec | None:
        """The cluster that `calibrate` measured; None if it was not run or failed."""
        return self._calibrated if isinstance(self._calibrated, ClusterSpec) else None

    def new_folder(self, name: str) -> Path:
        """A new path for a folder, which is not created."""
        return self.folder / f"{next(self._numbers)}-{name}"

    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def busy_share(self) -> float:
        """Share (0 to 1) of all cores in use now, while Shardwise itself waits."""
        return busy_share()

    def on_ranks(self, function: str, case: Mapping[str, Any]) -> Iterator[Any]:
        """Run `function(case)` on one rank per device; yield the values that rank 0 yields."""
        folder = self.new_folder(function.rpartition(":")[2])
        return on_ranks(function, case, self.machine.processes, folder, self.deadline)

    def command(self, *words: str) -> str:
        """Run `shardwise` with the arguments `words`; return its stdout.

        Raises CheckFailedError if it fails, or at the deadline.
        """
        log: list[str] = []
        ended = run_command([*words], log.append, self.seconds_left(), folder=self.folder)
        if ended.timed_out:
            raise CheckFailedError(f"shardwise {words[0]} did not end before the deadline; killed")
        if ended.exit_code:
            raise CheckFailedError(last_words("\n".join(log), ended.exit_code))
        return ended.output

    def cluster(self) -> ClusterSpec:
        """The cluster of this machine from the catalogue; else as `calibrate` measures it."""
        if self.machine.known is None:
            return self.calibrated()
        return ClusterSpec(device=self.machine.known, devices_per_node=self.machine.processes)

    def calibrated(self) -> ClusterSpec:
        """The cluster of this machine as `shardwise calibrate` measures it; measured only once."""
        if self._calibrated is None:
            try:
                self._calibrated = self._calibrate()
            except CheckFailedError as error:
                self._calibrated = error
        return _value(self._calibrated)

    def _calibrate(self) -> ClusterSpec:
        self.say("calibrate")
        file = self.new_folder("cluster").with_suffix(".toml")
        # --force: each check judges itself whether the machine is too busy.
        words = ["calibrate", "--force", "--output", str(file)]
        words += ["--nproc", str(self.machine.processes)]
        known = self.machine.known
        if known is not None and not known.is_cpu:
            words += ["--device", known.name]
        self.command(*words)
        return find_cluster(str(file))

    def trained(self, name: str, settings: workload.Settings) -> TrainedRun:
        """The workload trained with the strategy `settings`; each `name` is trained only once.

        Raises CheckFailedError if the training failed, and again on later calls.
        """
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
    """Return a stored result; if it is a failure, raise it again."""
    if isinstance(found, CheckFailedError):
        raise found
    return found
