"""Write run.json of a run in a background thread while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.checkpoint.format.folder import find_store, is_remote
from shardwise.checkpoint.format.storage import find_storage
from shardwise.launch.supervisor import count_recoveries
from shardwise.runs.record import NAME, SCHEMA, WRITE_EVERY_S, RunRecord, State, name_of
from shardwise.spec.run import RunSpec, run_table
from shardwise.spec.version import __version__
from shardwise.step.profile import StepProfile
from shardwise.trainer.periodic import Periodic


class Progress(NamedTuple):
    """Functions that return the current values of a run that trains."""

    completed_steps: Callable[[], int]
    # Step and URL of the last checkpoint; None before the first.
    checkpoint_step: Callable[[], int | None]
    checkpoint_url: Callable[[], str | None]
    # Step time and throughput over all representative steps so far.
    rates: Callable[[], Mapping[str, float]]


def first_record(run: RunSpec, predicted: StepProfile, folder: Path) -> RunRecord:
    """The record of a run that just starts or is resumed."""
    assert run.train is not None
    now = time.time()
    return RunRecord(
        schema=SCHEMA,
        name=name_of(folder),
        state="training",
        started=_started(folder / NAME, now),
        updated=now,
        step=0,
        planned_steps=run.train.steps,
        model=str(predicted.model["name"]),
        parameters=int(predicted.model["parameters"]),
        strategy=run.strategy.shorthand,
        cluster=str(run.cluster),
        devices=run.cluster.devices,
        version=__version__,
        predicted_step_s=predicted.time.step_s if predicted.time is not None else None,
        predicted_peak_bytes=predicted.known_memory.peak_allocated_bytes,
        settings=run_table(run),
    )


class RecordWriter:
    """Writes run.json at the start, every half minute and at the end.

    It goes into `folder` and, with train.checkpoint.to, into the run's folder there.
    """

    def __init__(self, first: RunRecord, folder: Path, to: str | None, progress: Progress) -> None:
        self._record, self._folder, self._progress = first, folder, progress
        self._urls = [str(folder / NAME)]
        if to is not None:
            place = find_storage("/".join([to.rstrip("/"), name_of(folder)]))
            self._urls.append(f"{place.url}/{NAME}")
        _write(self._urls[0], first)
        self._periodic = Periodic(self._write, WRITE_EVERY_S, f"write {NAME}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no infinity: values that are not finite are left out.
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        merged = {**self._record.values, **finite}
        self._record = msgspec.structs.replace(self._record, values=merged)

    def end(self, state: State, peak_bytes: int | None) -> None:
        """Set how the run ended, and its measured peak in bytes; `close` writes them."""
        self._record = msgspec.structs.replace(self._record, state=state, peak_bytes=peak_bytes)

    def close(self) -> None:
        self._periodic.close()

    def _write(self) -> None:
        record = msgspec.structs.replace(
            self._record,
            updated=time.time(),
            step=self._progress.completed_steps(),
            recoveries=count_recoveries(self._folder),
            checkpoint=self._progress.checkpoint_url(),
            values={**self._record.values, **self._progress.rates()},
        )
        for url in self._urls:
            _write(url, record)


def _write(url: str, record: RunRecord) -> None:
    """Write a record to a path or URL; a reader of a file sees the old one or the new one."""
    data = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    if is_remote(url):
        store, path = find_store(url)
        store.pipe_file(path, data)
        return
    file = Path(url)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".json.part")
    part.write_bytes(data)
    part.replace(file)


def _started(path: Path, now: float) -> float:
    """When the run was first started (Unix time), from its run.json; `now` if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord).started
    except (OSError, msgspec.MsgspecError):
        return now
