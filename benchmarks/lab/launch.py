"""Start real `shardwise train` processes on the hosts of a lab."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lab.network import INTERFACE, Host, kill_processes

ROOT = Path(__file__).resolve().parents[2]
MARK = "SHARDLAB_RUN"
# Ranks go before the other processes of the machine.
FIRST = "benchmarks.lab.first"
# Each host has its own ports; only launches on the same hosts need different ones.
_PORTS = itertools.count(29_500)
# Characters of a log in an error message.
LOG_CHARACTERS = 4000


class Outcome(NamedTuple):
    """Exit code, duration and files of a run; missing files are None or empty.

    `code` is None if the run was killed because it took too long. `step_s` has the time of every
    step after those that set up or measure; only runs of a session have it.
    """

    folder: Path
    code: int | None
    wall_s: float
    measured: dict[str, Any] | None
    predicted: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    step_s: list[float]
    error: str

    @property
    def ok(self) -> bool:
        return self.code == 0


def train(
    hosts: Sequence[Host],
    run_toml: Path,
    folder: Path,
    ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> Outcome:
    """Run `shardwise train run_toml` on all hosts together, with one thread per rank.

    All files of the run go to `folder`. A run that exceeds the timeout is killed.
    """
    asked = prepare(run_toml, folder)
    begin = time.monotonic()
    here = {"SHARDWISE_RUN_FOLDER": str(folder.resolve()), **(environment or {})}
    words = ["shardwise", "train", str(asked)]
    with Launch(hosts, words, folder / "logs", ranks_per_host, here) as launch:
        code = launch.wait(timeout_s)
    error = "" if code == 0 else launch.last_words()
    return read_outcome(folder, code, time.monotonic() - begin, error)


def prepare(run_toml: Path, folder: Path) -> Path:
    """Write the run as `asked.toml` in its folder, with one thread per rank and no trackers."""
    from shardwise.spec.run import read_run, write_run
    from shardwise.spec.train import TrainSettings

    folder.mkdir(parents=True, exist_ok=True)
    run = read_run(run_toml)
    settings = run.train or TrainSettings()
    settings = settings.but(
        threads=settings.threads or 1, trackers=settings.trackers or (), checkpoint=False
    )
    asked = folder.resolve() / "asked.toml"
    asked.write_text(write_run(run._replace(train=settings)))
    return asked


def read_outcome(folder: Path, code: int | None, wall_s: float, error: str) -> Outcome:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return Outcome(
        folder=folder,
        code=code,
        wall_s=wall_s,
        measured=_read(folder / "measurement.json"),
        predicted=_read(folder / "prediction.json"),
        metrics=[json.loads(line) for line in lines],
        step_s=(_read(folder / "steps.json") or {}).get("step_s", []),
        error=error,
    )


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    return found


class Launch:
    """`python -m WORDS…` as `ranks_per_host` ranks on each host, by torchrun; killed on exit.

    The output of each host goes to a file in `logs`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        words: Sequence[str],
        logs: Path,
        ranks_per_host: int,
        environment: Mapping[str, str],
    ) -> None:
        self._hosts, self._logs = hosts, logs
        self._mark = uuid.uuid4().hex
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            # The link's address: the kernel keeps traffic between ranks of one host off the link.
            "GLOO_SOCKET_IFNAME": INTERFACE,
            MARK: self._mark,
            **environment,
        }
        port = next(_PORTS)
        self._commands = [
            host.command(
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
                *(f"--node-rank={number}", f"--nproc-per-node={ranks_per_host}"),
                *(f"--master-addr={hosts[0].address}", f"--master-port={port}"),
                *(f"--local-addr={host.address}", "--module", FIRST, *words),
            )
            for number, host in enumerate(hosts)
        ]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Launch:
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            for number, command in enumerate(self._commands):
                with self._log(number).open("wb") as log:
                    process = subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C reaches only the lab, which then ends these processes.
                        start_new_session=True,
                    )
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def code(self) -> int | None:
        """The exit code once all hosts have finished or one has failed; None before."""
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        return None if None in codes else 0

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None after the timeout."""
        end = time.monotonic() + timeout_s
        while (code := self.code()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return code

    def last_words(self) -> str:
        """The last output of each host."""
        parts = []
        for number, process in enumerate(self._processes):
            text = self._log(number).read_text(errors="replace")[-LOG_CHARACTERS:]
            parts.append(f"host {number} (exit code {process.poll()}):\n{text}")
        return "\n".join(parts)

    def kill(self) -> None:
        kill_processes(self._hosts, f"{MARK}={self._mark}")
        for process in self._processes:
            process.wait()

    def _log(self, number: int) -> Path:
        return self._logs / f"host{number}.log"
