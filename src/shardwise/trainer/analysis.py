"""Analyse traces while the run continues, in another process at the lowest priority.

The training loop only polls for the result.
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

from shardwise.launch.child import start_python
from shardwise.launch.environment import PARENT, end_with_launcher
from shardwise.observe.run_folder import SUMMARY

log = logging.getLogger("shardwise")

# Seconds that an analysis waits for other ranks' traces, and that an ended run waits for analyses.
WAIT_FOR_TRACES_S, WAIT_AFTER_RUN_S = 20, 60
_CHILD = (
    "import runpy, sys; from shardwise.trainer.analysis import prepare_analysis; "
    "prepare_analysis(sys.argv.pop()); runpy.run_module('shardwise', run_name='__main__')"
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
    stderr: IO[bytes]


class Analyses:
    """Runs at most one analysis at a time; of further requests only the newest waits.

    `traces` is the number of trace files in the folder of a window.
    """

    def __init__(self, traces: int) -> None:
        self._traces = traces
        self._running: _Running | None = None
        self._waiting: tuple[Path, int] | None = None

    def start(self, folder: Path, step: int) -> None:
        """Analyse the traces of the window that begins with `step`, once all are written."""
        if self._running is not None:
            self._waiting = (folder, step)
            return
        stderr = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = ["trace", str(folder), "--json", str(self._traces)]
        try:
            with (folder / ".summary").open("wb") as output:
                process = start_python(
                    *("-c", _CHILD, *arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=stderr,
                    # Signals to the run must not reach the analysis.
                    start_new_session=True,
                    env={**os.environ, PARENT: str(os.getpid())},
                )
        except OSError as error:
            stderr.close()
            _warn(step, str(error))
            return
        self._running = _Running(process, folder, step, stderr)

    @property
    def busy(self) -> list[Path]:
        """Folders whose analysis is running or waiting."""
        running = [self._running.folder] if self._running is not None else []
        return running + ([self._waiting[0]] if self._waiting is not None else [])

    def collect(self) -> dict[str, float]:
        """Metrics of the analysis that has finished, as `_shares` returns them; empty if none has.

        Starts the waiting analysis, if any.
        """
        if self._running is None or self._running.process.poll() is None:
            return {}
        finished, self._running = self._running, None
        values = _result(finished)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self.start(*waiting)
        return values

    def drain(self, seconds: float) -> list[dict[str, float]]:
        """Metrics of all remaining analyses, as `_shares` returns them.

        Waits at most `seconds`, then kills an analysis that still runs.
        """
        end = time.monotonic() + seconds
        results = []
        while self._running is not None:
            try:
                self._running.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _warn(self._running.step, f"not finished {seconds:.0f} s after the run")
                self.close()
                break
            results.append(self.collect())
        return [values for values in results if values]

    def close(self) -> None:
        """Kill the running analysis and drop the waiting one."""
        if self._running is not None:
            self._running.process.kill()
            self._running.process.wait()
            self._running.stderr.close()
        self._running = self._waiting = None


def prepare_analysis(traces: str) -> None:
    """Prepare the analysis process: lower its priority and wait for `traces` trace files.

    The process ends with the run, and it waits at most WAIT_FOR_TRACES_S seconds.
    """
    end_with_launcher()
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    folder = Path(sys.argv[2])
    end = time.monotonic() + WAIT_FOR_TRACES_S
    while len(list(folder.glob("*.json.gz"))) < int(traces) and time.monotonic() < end:
        time.sleep(0.1)


def shares(summary: Mapping[str, Any], step: int) -> dict[str, float]:
    """Metrics of the profile that begins with `step`, by name.

    Shares of the profiled steps' time and the overlap, 0 to 1, are means over ranks.
    """
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
    """The share (0 to 1) of a rank's profiled time that `key`, in nanoseconds, takes."""
    windows = rank.get("steps") or [rank]
    return float(sum(w[key] for w in windows)) / (sum(w["window_ns"] for w in windows) or 1)


def _result(finished: _Running) -> dict[str, float]:
    """Metrics from the summary of a finished analysis; empty, with a warning, if it failed."""
    with finished.stderr:
        finished.stderr.seek(0)
        lines = finished.stderr.read().decode(errors="replace").strip().splitlines()
    unfinished = finished.folder / ".summary"
    try:
        if finished.process.returncode:
            unfinished.unlink(missing_ok=True)
            raise ValueError(lines[-1] if lines else f"exit code {finished.process.returncode}")
        values = shares(json.loads(unfinished.read_bytes()), finished.step)
        unfinished.replace(finished.folder / SUMMARY)
    except (OSError, ValueError, LookupError, TypeError) as error:
        _warn(finished.step, str(error))
        return {}
    return values


def _warn(step: int, reason: str) -> None:
    log.warning("The profile of step %d was not analysed: %s", step, reason)
