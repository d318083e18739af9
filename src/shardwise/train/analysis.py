"""Traces of a running run, read beside it: by another process, at the lowest priority.

The loop only ever asks whether an answer has come.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from shardwise.observe.run_folder import SUMMARY
from shardwise.train.launch import PARENT, end_with_launcher

log = logging.getLogger("shardwise")

# Seconds that an analysis waits for traces of other ranks, and a run that ends for the analysis.
PATIENCE_BEFORE, PATIENCE_AFTER = 20, 60
_CHILD = (
    "import runpy, sys; from shardwise.train.analysis import step_back; "
    "step_back(sys.argv.pop()); runpy.run_module('shardwise', run_name='__main__')"
)
_SHARES = {
    "profile_compute": "compute_ns",
    "profile_exposed": "exposed_communication_ns",
    "profile_idle": "idle_ns",
}


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    folder: Path
    step: int
    said: IO[bytes]


class Analyses:
    """At most one analysis runs; of moments that come meanwhile, the newest waits."""

    def __init__(self, traces: int) -> None:
        self._traces = traces
        self._running: _Running | None = None
        self._waiting: tuple[Path, int] | None = None

    def begin(self, folder: Path, step: int) -> None:
        """Read the traces of the moment that began with `step`, as soon as all are there."""
        if self._running is not None:
            self._waiting = (folder, step)
            return
        said = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = ["trace", str(folder), "--json", str(self._traces)]
        try:
            with (folder / ".summary").open("wb") as answer:
                process = subprocess.Popen(
                    [sys.executable, "-c", _CHILD, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=answer,
                    stderr=said,
                    # A signal for the run is not one for whoever reads its traces.
                    start_new_session=True,
                    env={**os.environ, PARENT: str(os.getpid())},
                )
        except OSError as error:
            said.close()
            _tell(step, str(error))
            return
        self._running = _Running(process, folder, step, said)

    @property
    def busy(self) -> list[Path]:
        """Folders that are read or will be."""
        running = [self._running.folder] if self._running is not None else []
        return running + ([self._waiting[0]] if self._waiting is not None else [])

    def take(self) -> dict[str, float]:
        """What a finished analysis found; nothing while there is none."""
        if self._running is None or self._running.process.poll() is None:
            return {}
        ended, self._running = self._running, None
        found = _answer(ended)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self.begin(*waiting)
        return found

    def rest(self, seconds: float) -> list[dict[str, float]]:
        """What is still to come, waited for at most so long."""
        end = time.monotonic() + seconds
        found = []
        while self._running is not None:
            try:
                self._running.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _tell(self._running.step, f"not done {seconds:.0f} s after the run")
                self.close()
                break
            found.append(self.take())
        return [values for values in found if values]

    def close(self) -> None:
        """Nobody wants to know any more."""
        if self._running is not None:
            self._running.process.kill()
            self._running.process.wait()
            self._running.said.close()
        self._running = self._waiting = None


def step_back(traces: str) -> None:
    """In the process of the analysis: yield to everyone, end with the run, wait for `traces`."""
    end_with_launcher()
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    folder = Path(sys.argv[2])
    end = time.monotonic() + PATIENCE_BEFORE
    while len(list(folder.glob("*.json.gz"))) < int(traces) and time.monotonic() < end:
        time.sleep(0.1)


def shares(summary: Mapping[str, Any], step: int) -> dict[str, float]:
    """Means over ranks of where the time of the profiled steps went."""
    ranks = summary["ranks"]
    values = {"profile_step": float(step)}
    for name, key in _SHARES.items():
        parts = [_share(rank, key) for rank in ranks]
        values[name] = sum(parts) / len(parts)
    overlaps = [rank["overlap"] for rank in ranks if rank.get("overlap") is not None]
    if overlaps:
        values["profile_overlap"] = sum(overlaps) / len(overlaps)
    return values


def _share(rank: Mapping[str, Any], key: str) -> float:
    windows = rank.get("steps") or [rank]
    return float(sum(w[key] for w in windows)) / (sum(w["window_ns"] for w in windows) or 1)


def _answer(ended: _Running) -> dict[str, float]:
    """The values of an analysis that has ended; none, and a line in the log, if it failed."""
    with ended.said:
        ended.said.seek(0)
        said = ended.said.read().decode(errors="replace").strip().splitlines()
    unfinished = ended.folder / ".summary"
    try:
        if ended.process.returncode:
            unfinished.unlink(missing_ok=True)
            raise ValueError(said[-1] if said else f"exit code {ended.process.returncode}")
        found = shares(json.loads(unfinished.read_bytes()), ended.step)
        unfinished.replace(ended.folder / SUMMARY)
    except (OSError, ValueError, LookupError, TypeError) as error:
        _tell(ended.step, str(error))
        return {}
    return found


def _tell(step: int, why: str) -> None:
    log.warning("the profile of step %d was not analysed: %s", step, why)
