"""One process of a run, from joining the others to the comparison of prediction and measurement."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from shardwise.api import estimate_run
from shardwise.checkpoint.dcp.load import Loaded
from shardwise.engine.mesh import leave, world
from shardwise.spec.run import RunSpec
from shardwise.spec.train import TrainSettings
from shardwise.step import StepProfile
from shardwise.train.checkpoints import RunCheckpoints
from shardwise.train.folder import folder_of_rank_0, lock_folder, write_json, write_setup
from shardwise.train.heartbeat import section, start_heart
from shardwise.train.loop import Logged, Training, train
from shardwise.train.measure import StepMeter, control_traffic, measured_profile, step_values
from shardwise.train.metrics import Tracker, memory_now, open_trackers
from shardwise.train.profile import StepProfiler, moments_of
from shardwise.train.start import start


class Display(Protocol):
    """What a person sees of a run, on rank 0."""

    def started(
        self, run: RunSpec, predicted: StepProfile, folder: Path, loaded: Loaded | None
    ) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None: ...

    def ended(self, result: Result) -> None: ...


class Result(NamedTuple):
    """How a run ended; `measured` is absent where the run was too short or told not to measure.

    `step_s` are the seconds of the steps behind that measurement: all, where none was made.
    """

    reason: str
    steps: int
    folder: Path
    predicted: StepProfile
    measured: StepProfile | None
    last: Mapping[str, float]
    step_s: Sequence[float] = ()
    stopped_by: int | None = None


def run_training(run: RunSpec, folder: Path, display: Display | None = None) -> Result:
    """Train what `run` describes on the processes that are running; all ranks call this."""
    result = _train(run, folder, display)
    leave()
    return result


def _train(run: RunSpec, folder: Path, display: Display | None) -> Result:
    # What cannot be profiled is refused before anything is built.
    settings = run.train or TrainSettings()
    moments_of(settings)
    start_heart(int(os.environ.get("RANK", "0")), settings.restart)
    run, training = start(run)
    rank, _ = world()
    leads = rank == 0
    folder = folder_of_rank_0(folder)
    lock = lock_folder(folder) if leads else None
    checkpoints = loaded = None
    if settings.checkpoint.save:
        checkpoints = RunCheckpoints(run, training, folder)
        with section("load", slow=True):
            loaded = checkpoints.load()
    predicted = predict(run, training)
    if leads:
        write_setup(folder, run)
        write_json(folder / "prediction.json", predicted.to_dict())
    shown = display if leads else None
    if shown is not None:
        shown.started(run, predicted, folder, loaded)
    watcher = _Recorder(run, training, predicted, folder, shown)
    try:
        reason = train(training, watcher, checkpoints)
        if reason != "stopped":
            watcher.finish()
    finally:
        watcher.close()
    result = Result(
        reason=reason,
        steps=training.step,
        folder=folder,
        predicted=predicted,
        measured=watcher.measured(),
        last=watcher.last,
        step_s=watcher.settled,
        stopped_by=training.stopped_by,
    )
    if leads and result.measured is not None:
        write_json(folder / "measurement.json", result.measured.to_dict())
        if (curve := watcher.memory_curve()) is not None:
            write_json(folder / "memory.json", curve)
    if shown is not None:
        shown.ended(result)
    if lock is not None:
        lock.close()
    return result


def predict(run: RunSpec, training: Training) -> StepProfile:
    """What a step of this run will take, the trainer's own small collectives included."""
    # On a CPU there is nowhere to offload to: all of it stays in the same memory.
    here = run.strategy.but(offload=run.strategy.offload and not run.cluster.device.is_cpu)
    profile = estimate_run(run._replace(strategy=here))
    settings = training.settings
    meter = _meter(run, training)
    tensors = sum(1 for p in training.model.parameters() if p.requires_grad)
    control = control_traffic(run, settings, tensors, meter.counted_step)
    return profile._replace(traffic=(*profile.traffic, *control))


def _meter(run: RunSpec, training: Training) -> StepMeter:
    compiled = run.strategy.compile
    return StepMeter(training, training.step, training.settings.steps, compiled=compiled)


class _Recorder:
    """Watches the loop: measures on every rank, writes and shows on rank 0."""

    def __init__(
        self,
        run: RunSpec,
        training: Training,
        predicted: StepProfile,
        folder: Path,
        display: Display | None,
    ) -> None:
        self._training, self._predicted, self._display = training, predicted, display
        settings: TrainSettings = training.settings
        self._meter = _meter(run, training)
        self._measures = settings.measure
        self._trackers: list[Tracker] = []
        if world()[0] == 0:
            self._trackers = open_trackers(settings.trackers, folder, training.step)
        device = run.cluster.device
        self._peak_flops = device.known_peak_flops(run.strategy.param_dtype)
        self.settled: list[float] = []
        self._profiler: StepProfiler | None = None
        moments = moments_of(settings, training.step)
        if settings.profile is not None and moments is not None:
            self._profiler = StepProfiler(settings.profile, moments, folder, training.device)
        self.last: dict[str, float] = {}

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self._profiler is not None:
            with section("trace", slow=True):
                self._profiler.step(step)
        if not self._measures:
            yield
            return
        with self._meter.step(step):
            yield

    def logged(self, line: Logged) -> None:
        first = line.step - len(line.step_s) + 1
        settled = [
            seconds for step, seconds in enumerate(line.step_s, first) if self._is_settled(step)
        ]
        self.settled += settled
        if world()[0] != 0:
            return
        self.last = self._values(line, settled)
        if self._profiler is not None:
            self.last |= self._profiler.values()
        for tracker in self._trackers:
            tracker.log(line.step, self.last)
        if self._display is not None:
            self._display.logged(line.step, self.last)

    def _is_settled(self, step: int) -> bool:
        """Whether a step's time says something about the run."""
        if self._profiler is not None and self._profiler.disturbs(step):
            return False
        return not self._measures or self._meter.settled(step)

    def _values(self, line: Logged, settled: list[float]) -> dict[str, float]:
        values = {
            "loss": line.loss,
            "gradient_norm": line.gradient_norm,
            "learning_rate": line.learning_rate,
            "skipped": float(line.skipped),
        }
        values |= step_values(self._predicted, settled, self._peak_flops)
        return values | memory_now(self._training.device)

    def measured(self) -> StepProfile | None:
        if not self._measures or not self._meter.finished:
            return None
        return measured_profile(self._predicted, self._meter, self.settled, self._peak_flops)

    def memory_curve(self) -> Mapping[str, object] | None:
        return self._meter.memory_curve()

    def finish(self) -> None:
        """Log what is known only after the last step."""
        for values in self._profiler.rest() if self._profiler is not None else []:
            for tracker in self._trackers:
                tracker.log(self._training.step - 1, values)

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
        for tracker in self._trackers:
            tracker.close()
