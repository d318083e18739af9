"""Hang detection under torchrun and srun, whose launchers have none: a process on each host.

The first rank of a host starts it. It reads the heartbeats of the ranks there, and reports and
kills a rank that hangs, as `shardwise train` does with ranks that it launched. The launcher then
sees that a rank was killed, and restarts or ends the run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from shardwise.launch.child import start_python
from shardwise.launch.heartbeat import FOLDER
from shardwise.launch.membership import Fault
from shardwise.launch.supervisor import Supervisor
from shardwise.spec.train import RestartSettings

_POLL_S = 0.2


def watch_this_host(settings: RestartSettings) -> None:
    """Make this rank write heartbeats; the first rank of a host starts the process that reads them.

    Does nothing if the launcher reads them, or for a single process.
    """
    if FOLDER in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    # The ranks of a host have the same parent: torchrun's agent, or Slurm's step daemon.
    parent = psutil.Process(os.getppid())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"shardwise-{os.getuid()}-{parent.pid}-{parent.create_time():.0f}-{attempt}"
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return  # somebody else has created it
    os.environ[FOLDER] = str(folder)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        _start_watcher(folder, settings)


def _start_watcher(folder: Path, settings: RestartSettings) -> None:
    """Start the process that reads the heartbeats in `folder`."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    alone = processes == int(os.environ.get("WORLD_SIZE", "1"))
    words = [str(folder), str(os.getpid()), str(processes), str(int(alone))]
    start_python(
        *("-m", "shardwise.launch.watcher", *words, settings.model_dump_json()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # It must not get signals that a terminal or a launcher sends to the ranks.
        start_new_session=True,
    )


class UnknownHosts:
    """Stands for other hosts of which nothing is known: ranks waiting for them are not killed."""

    name = ""
    blamed: Fault | None = None

    def report_progress(self, step: int, section: str, waits: bool) -> None: ...

    def report_failure(self, cause: str, lost_peer: bool) -> None: ...

    def faults(self) -> Sequence[Fault]:
        return ()

    def can_grow(self) -> bool:
        return False

    def can_leave(self) -> bool:
        return False

    def behind(self) -> str | None:
        return None


def main(words: Sequence[str]) -> None:
    """Supervise the ranks of this host until the rank that started this process has ended."""
    folder, rank, processes, alone, settings = words
    supervisor = Supervisor(
        Path(folder),
        Path(folder),
        int(processes),
        RestartSettings(**json.loads(settings)),
        None if alone == "1" else UnknownHosts(),
    )
    while os.getppid() == int(rank):
        supervisor.poll()
        time.sleep(_POLL_S)
    if not Path(folder, "hangs").exists():
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
