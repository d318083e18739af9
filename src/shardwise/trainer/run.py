"""One process of a run: join the others, train, and compare prediction and measurement."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from shardwise.checkpoint.dcp.load import Loaded
from shardwise.engine.mesh import leave, world
from shardwise.launch.best_effort import BestEffort
from shardwise.launch.heartbeat import section, start_heartbeat
from shardwise.launch.traffic import watch_connections
from shardwise.predict.api import estimate_run
from shardwise.runs.record import State
from shardwise.spec.progress import stages
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.spec.version import __version__
from shardwise.step.profile import StepProfile
from shardwise.trainer.agree import Reason
from shardwise.trainer.checkpoints import RunCheckpoints
from shardwise.trainer.data.packing import DataStatistics
from shardwise.trainer.evaluation import Evaluated
from shardwise.trainer.folder import folder_of_rank_0, lock_folder, write_json, write_setup
from shardwise.trainer.loop import Logged, Training, train
from shardwise.trainer.measure import (
    StepMeter,
    control_traffic,
    counting_loss_tokens,
    measured_profile,
    step_values,
)
from shardwise.trainer.metric_names import INFO
from shardwise.trainer.metrics import Tracker, memory_now, open_trackers
from shardwise.trainer.profile import StepProfiler, windows_of
from shardwise.trainer.prometheus import Exporter, LiveRun
from shardwise.trainer.replicas.group import (
    ReplicaGroup,
    hang_limits,
    replica_group,
    settings_checksum,
)
from shardwise.trainer.run_record import Progress, RecordWriter, first_record
from shardwise.trainer.start import start


class Display(Protocol):
    """Shows the run to a person, on rank 0."""

    def started(
        self,
        run: RunSpec,
        predicted: StepProfile,
        folder: Path,
        loaded: Loaded | None,
        data: DataStatistics | None = None,
        completed_steps: Callable[[], int] = lambda: 0,
    ) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None: ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None: ...

    def ended(self, result: Result) -> None: ...


class Result(NamedTuple):
    """How a run ended.

    Rank 0 alone predicts and reports: `predicted` and `measured` are None on other ranks.
    `measured` is also None if the run was too short or train.measure is false. `step_s` are the
    seconds of representative steps: those after the measured ones, or all.
    """

    reason: str
    steps: int
    folder: Path
    predicted: StepProfile | None
    measured: StepProfile | None
    last: Mapping[str, float]
    step_s: Sequence[float] = ()
    # The signal that stopped the run, and the last checkpoint.
    stopped_by: int | None = None
    checkpoint: str | None = None
    # The checkpoint with the lowest held-out loss, with eval.keep_best.
    best: BestCheckpoint | None = None


class BestCheckpoint(NamedTuple):
    """The checkpoint with the lowest held-out loss: its step, that loss, and its path or URL."""

    step: int
    eval_loss: float
    checkpoint: str


def run_training(run: RunSpec, folder: Path, display: Display | None = None) -> Result:
    """Train `run` on the current processes and leave the process group; all ranks call this."""
    result = _train(run, folder, display)
    leave()
    return result


def _write_prediction(run: RunSpec, training: Training, folder: Path) -> StepProfile:
    """Predict a step, and write the prediction and the setup of the run to its folder."""
    with section("predict", slow=True):
        predicted = predict(run, training)
    write_setup(folder, run)
    write_json(folder / "prediction.json", predicted.to_dict())
    return predicted


def _write_measurement(folder: Path, measured: StepProfile, recorder: _Recorder) -> None:
    """Write the measured profile and, if recorded, the curve of memory; errors are logged."""
    with BestEffort(f"write the measurement to {folder}"):
        write_json(folder / "measurement.json", measured.to_dict())
        if (curve := recorder.memory_curve()) is not None:
            write_json(folder / "memory.json", curve)


def _train(run: RunSpec, folder: Path, display: Display | None) -> Result:
    settings = run.train or TrainSettings()
    windows_of(settings)  # raises SpecError before anything is built
    start_heartbeat(int(os.environ.get("RANK", "0")), hang_limits(settings.restart))
    group = replica_group(run)
    watch_connections(
        int(os.environ.get("RANK", "0")), settings.restart.lost_after_s, always=group is not None
    )
    run, training = start(run, group)
    rank, _ = world()
    is_main = rank == 0
    folder = folder_of_rank_0(folder)
    lock = lock_folder(folder) if is_main else None
    checkpoints = loaded = None
    if settings.checkpoint.save:
        stages.begin("Looking for a checkpoint")
        checkpoints = _checkpoints(run, training, folder, group)
        with section("load", slow=True):
            loaded = checkpoints.load()
    stages.begin("Predicting a step")
    # Rank 0 alone: tracing a model may take a minute of every core. The others wait for step 1.
    predicted = _write_prediction(run, training, folder) if is_main else None
    shown = display if is_main else None
    if shown is not None and predicted is not None:
        shown.started(
            *(run, predicted, folder, loaded, training.batches.statistics), lambda: training.step
        )
    recorder = _Recorder(run, training, predicted, folder, shown, checkpoints)
    state: State = "failed"
    try:
        if group is None:
            reason = train(training, recorder, checkpoints)
        else:
            reason = _train_in_group(run, training, recorder, checkpoints, group, folder)
        # A run that changes its number of hosts continues.
        state = "training" if reason == "resizing" else reason
        if reason not in ("stopped", "resizing"):
            recorder.finish()
    finally:
        recorder.close(state)
    result = Result(
        reason=reason,
        steps=training.step,
        folder=folder,
        predicted=predicted,
        measured=recorder.measured(),
        last=recorder.last,
        step_s=recorder.settled,
        stopped_by=training.stopped_by,
        checkpoint=checkpoints.last_url if checkpoints is not None else None,
        best=_best(checkpoints) if checkpoints is not None else None,
    )
    if is_main and result.measured is not None:
        _write_measurement(folder, result.measured, recorder)
    if shown is not None:
        shown.ended(result)
    if lock is not None:
        lock.close()
    return result


def _best(checkpoints: RunCheckpoints) -> BestCheckpoint | None:
    best = checkpoints.best
    return None if best is None else BestCheckpoint(*best, checkpoints.url_of(best.step))


def _checkpoints(
    run: RunSpec, training: Training, folder: Path, group: ReplicaGroup | None
) -> RunCheckpoints:
    """The checkpoints of the run, which all replica groups share."""
    if group is None:
        return RunCheckpoints(run, training, folder)
    # The folders of all replica groups are inside the folder of the run.
    return RunCheckpoints(run, training, folder.parent, writer=folder.name)


def _train_in_group(
    run: RunSpec,
    training: Training,
    recorder: _Recorder,
    checkpoints: RunCheckpoints | None,
    group: ReplicaGroup,
    folder: Path,
) -> Reason:
    from shardwise.trainer.replicas.loop import train_in_group

    assert checkpoints is not None
    return train_in_group(training, recorder, checkpoints, group, settings_checksum(run), folder)


def predict(run: RunSpec, training: Training) -> StepProfile:
    """Predict a step of this run, including the trainer's own small collectives."""
    profile = estimate_run(run._replace(strategy=_strategy_of_typical_step(run)))
    if profile.parts is not None:
        # Memory is measured on rank 0.
        profile = profile._replace(memory=profile.parts[0].memory)
    if (data := training.batches.statistics) is not None:
        profile = counting_loss_tokens(profile, data.loss_share)
    settings = training.settings
    meter = _meter(run, training)
    control = control_traffic(run, settings, training.model, meter.traffic_step)
    return profile._replace(traffic=(*profile.traffic, *control))


def _offloaded_here(run: RunSpec) -> Strategy:
    """The strategy with what leaves the device's memory: on a CPU all stays in the same.

    There an offloaded optimizer only adds its master weights and gradients.
    """
    if not run.cluster.device.is_cpu:
        return run.strategy
    return run.strategy.but(offload="optimizer" if run.strategy.offloads("optimizer") else False)


def _strategy_of_typical_step(run: RunSpec) -> Strategy:
    """The strategy of the steps that are measured: a short run may end before PowerSGD begins."""
    strategy = _offloaded_here(run)
    assert run.train is not None
    compresses = strategy.steps_uncompressed < run.train.steps
    return strategy if compresses else strategy.but(compress=None)


def _meter(run: RunSpec, training: Training) -> StepMeter:
    """The meter of the first steps that are typical for the run."""
    first, last = run.strategy.steps_uncompressed, training.settings.steps
    completed = max(training.step, first) if first < last else training.step
    return StepMeter(training, completed, last, compiled=run.strategy.compile)


def _progress(
    training: Training,
    checkpoints: RunCheckpoints | None,
    rates: Callable[[], Mapping[str, float]],
) -> Progress:
    return Progress(
        completed_steps=lambda: training.step,
        checkpoint_step=lambda: None if checkpoints is None else checkpoints.last_step,
        checkpoint_url=lambda: None if checkpoints is None else checkpoints.last_url,
        rates=rates,
    )


def _live_run(run: RunSpec, predicted: StepProfile, folder: Path, progress: Progress) -> LiveRun:
    assert run.train is not None
    labels = (predicted.model["name"], run.strategy, run.cluster, __version__)
    return LiveRun(
        folder=folder,
        labels=dict(zip(INFO.labels, map(str, labels), strict=True)),
        planned_steps=run.train.steps,
        progress=progress,
        predicted_step_s=predicted.time.step_s if predicted.time is not None else None,
        predicted_memory_bytes=predicted.known_memory.peak_allocated_bytes,
    )


class _Recorder:
    """Observes the loop: measures on every rank, writes and shows on rank 0."""

    def __init__(
        self,
        run: RunSpec,
        training: Training,
        predicted: StepProfile | None,
        folder: Path,
        display: Display | None,
        checkpoints: RunCheckpoints | None = None,
    ) -> None:
        self._training, self._predicted, self._display = training, predicted, display
        self._showing = BestEffort("print a log line")
        settings: TrainSettings = training.settings
        self._meter = _meter(run, training)
        self._measures = settings.measure
        self._trackers: list[Tracker] = []
        self._record: RecordWriter | None = None
        if predicted is not None:
            self._trackers = open_trackers(settings.trackers, folder, training.step)
            progress = _progress(training, checkpoints, self._rates)
            if settings.metrics is not None:
                live = _live_run(run, predicted, folder, progress)
                self._trackers.append(Exporter(settings.metrics, live))
            first = first_record(run, predicted, folder)
            self._record = RecordWriter(first, folder, settings.checkpoint.to, progress)
            self._trackers.append(self._record)
        device = run.cluster.device
        self._peak_flops = device.known_peak_flops(run.strategy.param_dtype)
        self.settled: list[float] = []
        self._profiler: StepProfiler | None = None
        windows = windows_of(settings, training.step)
        if settings.profile is not None and windows is not None:
            self._profiler = StepProfiler(
                settings.profile, windows, folder, training.device, run.strategy
            )
        self.last: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self._profiler is not None:
            with section("profile", slow=True):
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
        if self._predicted is None:
            return
        values = self._values(self._predicted, line, settled)
        if self._profiler is not None:
            values |= self._profiler.values()
        self._track(line.step, values)
        self.last = values | self._evaluated
        if self._display is not None:
            # The output may be a file on a full disk.
            with self._showing:
                self._display.logged(line.step, values)

    def evaluated(self, found: Evaluated) -> None:
        if self._predicted is None:
            return
        self._evaluated = found.values
        self._track(found.step, self._evaluated)
        self.last |= self._evaluated
        if self._display is not None:
            with self._showing:
                self._display.evaluated(found.step, self._evaluated)

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def _is_settled(self, step: int) -> bool:
        """Whether a step's time is representative of the run."""
        if self._profiler is not None and self._profiler.slows(step):
            return False
        return not self._measures or self._meter.settled(step)

    def _values(
        self, predicted: StepProfile, line: Logged, settled: list[float]
    ) -> dict[str, float]:
        """The values of a log line, by name: loss, norm, learning rate, skipped, times, memory.

        `settled` are seconds of representative steps; empty gives no times. `predicted` gives the
        FLOPs of a step, from which the MFU follows.
        """
        values = {
            "loss": line.loss,
            "gradient_norm": line.gradient_norm,
            "learning_rate": line.learning_rate,
            "skipped": float(line.skipped),
            **line.routing,
        }
        tokens = line.tokens / line.steps
        values |= step_values(predicted, settled, self._peak_flops, tokens)
        return values | memory_now(self._training.device)

    def _rates(self) -> dict[str, float]:
        """Step time and throughput over all representative steps so far; empty if not rank 0."""
        if self._predicted is None:
            return {}
        return step_values(self._predicted, self.settled, self._peak_flops)

    def measured(self) -> StepProfile | None:
        """The measured profile; None if not rank 0, not measured, or too short a run."""
        if self._predicted is None or not self._measures or not self._meter.finished:
            return None
        return measured_profile(self._predicted, self._meter, self.settled, self._peak_flops)

    def memory_curve(self) -> Mapping[str, object] | None:
        return self._meter.memory_curve()

    def finish(self) -> None:
        """Log the profile metrics that are known only after the last step."""
        for values in self._profiler.finish() if self._profiler is not None else []:
            for tracker in self._trackers:
                tracker.log(self._training.step, values)

    def close(self, state: State) -> None:
        """Stop the profiler, record how the run ended, and close the trackers."""
        if self._profiler is not None:
            self._profiler.close()
        if self._record is not None:
            measured = self.measured()
            memory = measured.memory if measured is not None else None
            self._record.end(state, memory.peak_allocated_bytes if memory is not None else None)
        for tracker in self._trackers:
            tracker.close()
