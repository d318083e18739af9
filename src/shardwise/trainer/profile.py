"""Profile selected steps of a run: one trace per rank and window of steps."""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerAction, profile

from shardwise.engine.mesh import world
from shardwise.observe.rank.axes import MESH
from shardwise.observe.run_folder import TRACES, profiled_windows
from shardwise.pytorch.device import profiled_activities
from shardwise.spec.mesh import AXES
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import ProfileSettings, TrainSettings
from shardwise.trainer.analysis import WAIT_AFTER_RUN_S, Analyses
from shardwise.trainer.measure import MEMORY_STEP

log = logging.getLogger("shardwise")


class Windows(NamedTuple):
    """The profiled steps: `length` in a row from step `first` on, repeated every `every` steps."""

    first: int
    length: int
    every: int | None
    # The last step of the run. A window that would extend beyond it is left out.
    last: int

    def position(self, step: int) -> int | None:
        """The position of a step in its window; None outside of the windows.

        The profiler warms up at -1, records from 0 to `length` - 1, and writes the trace at
        `length`.
        """
        position = step - self.first
        if self.every is not None and position >= -1:
            position = (position + 1) % self.every - 1
        fits = step - position + self.length - 1 <= self.last
        return position if fits and -1 <= position <= self.length else None

    def action(self, step: int) -> ProfilerAction:
        """What torch.profiler does in `step`: the function for its `schedule`."""
        position = self.position(step)
        if position is None or position == self.length:
            return ProfilerAction.NONE
        if position < 0:
            return ProfilerAction.WARMUP
        last = position == self.length - 1
        return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD


def steps_before_profile(after: int, measure: bool, completed: int = 0) -> int:
    """The number of steps before the first profiled one: `after`, or more.

    There are at least two after the `completed` ones and, with `measure`, those whose traffic and
    memory are measured.
    """
    measured = MEMORY_STEP - 1 if measure else 0
    return max(after, completed + measured + 2)


def windows_of(settings: TrainSettings, completed: int = 0) -> Windows | None:
    """The windows to profile in a run that has `completed` steps; None if there are none.

    Raises SpecError if a new run ends before its first window does.
    """
    profile = settings.profile
    if profile is None:
        return None
    before = steps_before_profile(profile.after, settings.measure, completed)
    if profile.every is not None:
        # A resumed run profiles the same steps as an uninterrupted one.
        before += (profile.after - before) % profile.every
    last = before + profile.length
    if last > settings.steps and completed:
        return None
    if last > settings.steps:
        raise SpecError(
            f"train.profile: steps {before + 1} to {last} would be profiled, but train.steps is "
            f"{settings.steps}; set train.steps to at least {last}, or profile earlier or fewer"
        )
    return Windows(before + 1, profile.length, profile.every, settings.steps)


def window_folder(run: Path, step: int) -> Path:
    """The folder of the traces of the window that begins with `step`."""
    return run / TRACES / f"step-{step:06}"


class StepProfiler:
    """Profiles the windows of a run and writes `<folder>/traces/step-000123/rank0.json.gz`.

    All ranks create a StepProfiler. If windows repeat, rank 0 starts another process to analyse
    each.
    """

    def __init__(
        self,
        settings: ProfileSettings,
        windows: Windows,
        folder: Path,
        device: torch.device,
        strategy: Strategy,
    ) -> None:
        rank, size = world()
        self._windows, self._keep = windows, settings.keep
        self._mesh = mesh_metadata(strategy)
        self._folder = folder
        self._name = f"rank{rank:0{len(str(size - 1))}}"
        self._window = windows.first
        self._analyses: Analyses | None = None
        self._profiler: profile | None = None
        self._started = False
        all_ranks = settings.ranks == "all"
        if rank == 0 and windows.every is not None:
            self._analyses = Analyses(size if all_ranks else 1)
        if rank == 0 or all_ranks:
            _silence_profiler()
            self._profiler = profile(
                activities=profiled_activities(device),
                schedule=windows.action,
                on_trace_ready=self._write,
                record_shapes=settings.shapes,
                profile_memory=settings.memory,
            )

    def step(self, step: int) -> None:
        """Tell the profiler that step `step` begins."""
        if self._profiler is None:
            return
        if self._started:
            self._profiler.step()
        else:
            # Traces show the step numbers of the run, also after a resume.
            self._profiler.step_num = step
            self._profiler.start()
            self._started = True
        if self._windows.position(step) == 0:
            self._window = step
            self._profiler.add_metadata_json(MESH, self._mesh)

    def slows(self, step: int) -> bool:
        """Whether the profiler makes step `step` slower than others."""
        return self._windows.position(step) is not None

    def values(self) -> dict[str, float]:
        """Metrics of an analysis that finished since the last call; empty if none did."""
        return self._analyses.collect() if self._analyses is not None else {}

    def finish(self) -> list[dict[str, float]]:
        """Write the last trace, wait for the remaining analyses, and return their metrics.

        Called at the end of the run.
        """
        self._stop()
        results = self._analyses.drain(WAIT_AFTER_RUN_S) if self._analyses is not None else []
        self._remove_old()
        return results

    def close(self) -> None:
        """Stop without waiting for analyses.

        The trace of an unfinished window is written as far as it was recorded.
        """
        self._stop()
        if self._analyses is not None:
            self._analyses.close()

    def _stop(self) -> None:
        if self._profiler is not None and self._started:
            self._started = False
            self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Write the recorded trace of this rank, start its analysis, and remove old windows.

        An error of the file system is logged only.
        """
        folder = window_folder(self._folder, self._window)
        unpacked, packed = (folder / f".{self._name}.{kind}" for kind in ("unpacked", "packed"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unpacked))
            with unpacked.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            unpacked.unlink()
            packed.replace(folder / f"{self._name}.json.gz")
        except OSError as error:
            log.warning("Could not write the trace of step %d: %s", self._window, error)
            return
        if self._analyses is not None:
            self._analyses.start(folder, self._window)
        self._remove_old()

    def _remove_old(self) -> None:
        # On every machine, since machines may not share a disk.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            busy = self._analyses.busy if self._analyses is not None else []
            remove_old(self._folder / TRACES, self._keep, busy)


def mesh_metadata(strategy: Strategy) -> str:
    """JSON of [size, stride] of the rank groups along each axis of the mesh.

    Readers of a trace learn from it which ranks form a group.
    """
    mesh = strategy.mesh
    groups = {**mesh._asdict(), "shard": mesh.states}
    strides = {axis: strategy.stride(axis) for axis in AXES}
    # FSDP's groups include the context axis, whose ranks are adjacent: they have its stride.
    strides["shard"] = strides["context"]
    along = {axis: [groups[axis], strides[axis]] for axis in AXES}
    # Experts are a view of these groups: neighbours divide them, the others shard each part.
    degree, stride = strategy.expert, strategy.stride("expert")
    along_experts = {
        "expert": [degree, stride],
        "expert_shard": [mesh.states // degree, stride * degree],
    }
    return json.dumps({**along, **along_experts})


def _silence_profiler() -> None:
    """Suppress the profiler's messages about its start and stop."""
    # Kineto announces at a level without a name; 6 is above it.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def remove_old(traces: Path, keep: int, busy: Collection[Path] = ()) -> None:
    """Remove all but the newest `keep` trace folders and those in `busy`; 0 keeps all."""
    for folder in profiled_windows(traces)[:-keep] if keep else []:
        if folder not in busy:
            shutil.rmtree(folder, ignore_errors=True)
