"""Profile chosen steps of a run: a trace per rank and moment, under the run's step numbers."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from shardwise.engine.mesh import world
from shardwise.observe.run_folder import TRACES, profiled_moments
from shardwise.spec.record import SpecError
from shardwise.spec.train import ProfileSettings, TrainSettings
from shardwise.train.analysis import PATIENCE_AFTER, Analyses
from shardwise.train.measure import WEIGHED_STEP

log = logging.getLogger("shardwise")


class Moments(NamedTuple):
    """Which steps are profiled: `length` in a row from `first` on, and again every so many."""

    first: int
    length: int
    every: int | None
    # Steps of the run. A moment that would not end before it is left out.
    last: int

    def place(self, step: int) -> int | None:
        """Where a step lies in its moment; None outside.

        The profiler warms up in -1, records from 0 to `length` - 1, and writes in `length`.
        """
        place = step - self.first
        if self.every is not None and place >= -1:
            place = (place + 1) % self.every - 1
        fits = step - place + self.length <= self.last
        return place if fits and -1 <= place <= self.length else None

    def action(self, step: int) -> ProfilerAction:
        """The schedule of torch.profiler."""
        place = self.place(step)
        if place is None or place == self.length:
            return ProfilerAction.NONE
        if place < 0:
            return ProfilerAction.WARMUP
        last = place == self.length - 1
        return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD


def first_profiled(after: int, measure: bool, start: int = 0) -> int:
    """The first step that can be profiled: the ones counted and weighed come before."""
    set_up = WEIGHED_STEP if measure else 0
    return max(after, start + set_up + 2)


def moments_of(settings: TrainSettings, start: int = 0) -> Moments | None:
    """When a run from step `start` on is profiled; None where it is not, or no more."""
    asked = settings.profile
    if asked is None:
        return None
    first = first_profiled(asked.after, settings.measure, start)
    if asked.every is not None:
        # Moments lie where they would in a run from the beginning.
        first += (asked.after - first) % asked.every
    end = first + asked.length
    if end > settings.steps and start:
        return None
    if end > settings.steps:
        raise SpecError(
            f"train.profile: steps {first} to {end - 1} would be profiled, but the run ends after "
            f"{settings.steps}; set train.steps to at least {end}, or profile earlier or fewer"
        )
    return Moments(first, asked.length, asked.every, settings.steps)


def moment_folder(run: Path, step: int) -> Path:
    """Where the traces of the moment that begins with `step` are, in the folder of a run."""
    return run / TRACES / f"step-{step:06}"


class StepProfiler:
    """Follows a run step by step and writes `<folder>/traces/step-000123/rank0.json.gz`.

    All ranks make one. Where moments repeat, rank 0 has each analysed beside the run.
    """

    def __init__(
        self, settings: ProfileSettings, moments: Moments, folder: Path, device: torch.device
    ) -> None:
        rank, size = world()
        self._moments, self._keep = moments, settings.keep
        self._folder = folder
        self._name = f"rank{rank:0{len(str(size - 1))}}"
        self._moment = moments.first
        self._analyses: Analyses | None = None
        self._profiler: profile | None = None
        self._started = False
        everyone = settings.ranks == "all"
        if rank == 0 and moments.every is not None:
            self._analyses = Analyses(size if everyone else 1)
        if rank == 0 or everyone:
            _quieten()
            cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *cuda],
                schedule=moments.action,
                on_trace_ready=self._write,
                record_shapes=settings.shapes,
                profile_memory=settings.memory,
            )

    def step(self, step: int) -> None:
        """A step begins; the one before has ended."""
        if self._profiler is None:
            return
        if self._started:
            self._profiler.step()
        else:
            # Labels in traces are the run's own, wherever it starts.
            self._profiler.step_num = step
            self._profiler.start()
            self._started = True
        if self._moments.place(step) == 0:
            self._moment = step

    def disturbs(self, step: int) -> bool:
        """Whether a step's time says more about the profiler than about the run."""
        return self._moments.place(step) is not None

    def values(self) -> dict[str, float]:
        """What an analysis found that has ended since the last call, for a log line."""
        return self._analyses.take() if self._analyses is not None else {}

    def rest(self) -> list[dict[str, float]]:
        """The run has ended: write what was recorded, and wait for the analyses under way."""
        self._stop()
        found = self._analyses.rest(PATIENCE_AFTER) if self._analyses is not None else []
        self._remove_old()
        return found

    def close(self) -> None:
        """Leave, waiting for nobody; a moment that is not over is written as far as it came."""
        self._stop()
        if self._analyses is not None:
            self._analyses.close()

    def _stop(self) -> None:
        if self._profiler is not None and self._started:
            self._started = False
            self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        folder = moment_folder(self._folder, self._moment)
        unpacked, packed = (folder / f".{self._name}.{kind}" for kind in ("unpacked", "packed"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unpacked))
            with unpacked.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            unpacked.unlink()
            packed.replace(folder / f"{self._name}.json.gz")
        except OSError as error:
            log.warning("no trace of step %d: %s", self._moment, error)
            return
        if self._analyses is not None:
            self._analyses.begin(folder, self._moment)
        self._remove_old()

    def _remove_old(self) -> None:
        # On every machine: they may not share their disks.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            busy = self._analyses.busy if self._analyses is not None else []
            remove_old(self._folder / TRACES, self._keep, busy)


def _quieten() -> None:
    """Of a profiler that starts, stops and forgets as planned nobody needs to hear."""
    # Above the level of its announcements, which have no level of their own that can be named.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def remove_old(traces: Path, keep: int, busy: Collection[Path] = ()) -> None:
    """Leave the newest `keep` moments, and those that are being read; 0 leaves all."""
    for folder in profiled_moments(traces)[:-keep] if keep else []:
        if folder not in busy:
            shutil.rmtree(folder, ignore_errors=True)
