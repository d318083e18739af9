"""Replica groups of a real run and their lighthouse, in processes of their own.

They are on this machine, or on hosts that are network namespaces of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.lab.network import Host
from benchmarks.replicas.recorded import DIGESTS
from shardwise.launch.launcher import kill_tree
from shardwise.pytorch.store import listen
from shardwise.trainer.replicas.changes import FILE as CHANGES
from shardwise.trainer.replicas.group import REPLICA

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
RUN = """
cluster = "{groups}x2xCPU"
model = "benchmarks.replicas.recorded:model"
job = {{ seq_len = 16 }}

[strategy]
kind = "zero3"
shard = 2
replicate = {groups}
micro_batch = 2
param_dtype = "fp32"
{strategy}

[train]
steps = {steps}
schedule = "constant"
learning_rate = 1e-2
weight_decay = 0.1
log_every = 10
trackers = []
measure = false
meta_init = false
threads = 1
checkpoint = {{ every = 20 }}

[train.restart]
engine = "torchft"
lighthouse = "{lighthouse}"
{restart}
"""


class Commit(NamedTuple):
    """A step that one rank of a group committed."""

    group: int
    rank: int
    step: int
    digest: int
    at: float


def free_port() -> int:
    with listen("127.0.0.1") as listener:
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    """Whether the condition holds within some time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Groups:
    """Replica groups that can be killed and started again.

    A group is one launch, or several on hosts of its own; those are its parts.
    """

    def __init__(
        self,
        folder: Path,
        groups: int,
        steps: int,
        restart: str,
        strategy: str,
        server: Host | None = None,
    ) -> None:
        self.folder, self.count, self._server = folder, groups, server
        address = server.address if server is not None else "127.0.0.1"
        self.lighthouse = f"{address}:{free_port()}"
        self._running: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._files: list[IO[Any]] = []
        self.digests = folder / "digests"
        self.digests.mkdir(parents=True)
        text = RUN.format(
            groups=groups,
            steps=steps,
            lighthouse=self.lighthouse,
            restart=restart,
            strategy=strategy,
        )
        (folder / "run.toml").write_text(text)

    def start_lighthouse(self, min_replicas: int = 1) -> None:
        command = shutil.which("torchft_lighthouse", path=sysconfig.get_path("scripts"))
        assert command is not None, "needs torchft: pip install shardwise[torchft]"
        words = [command, "--bind", self.lighthouse, "--min_replicas", str(min_replicas),
                 "--heartbeat_timeout_ms", "3000"]  # fmt: skip
        self._lighthouse = subprocess.Popen(
            _on(self._server, words), stderr=self._log("lighthouse")
        )

    def kill_lighthouse(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.wait()

    def start(
        self,
        group: int,
        part: int = 0,
        host: Host | None = None,
        processes: int = 2,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start a group or a part of it, or start it again."""
        words = [sys.executable, "-m", "shardwise", "train", "run.toml", "--nproc", str(processes),
                 "--name", "it", "--resume"]  # fmt: skip
        self._running[group, part] = subprocess.Popen(
            _on(host, words),
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "OMP_NUM_THREADS": "1",
                REPLICA: str(group),
                DIGESTS: str(self.digests),
                **(variables or {}),
            },
            stdout=self._log(f"out-{group}-{part}"),
            stderr=self._log(f"err-{group}-{part}"),
        )

    def _log(self, name: str) -> IO[Any]:
        self._files.append((self.folder / name).open("a"))
        return self._files[-1]

    def kill(self, group: int, part: int = 0) -> float:
        """Kill all processes of a group or part at once; return when."""
        at = time.time()
        kill_tree(self._running[group, part].pid)
        self._running[group, part].wait()
        return at

    def pid(self, group: int, part: int = 0) -> int:
        return self._running[group, part].pid

    def stop(self, number: int = signal.SIGTERM, only: int | None = None) -> list[int]:
        """Stop all groups, or only one, with a signal; return their exit codes."""
        for (group, _), process in self._running.items():
            if only in (None, group):
                process.send_signal(number)
        return self.ended(only)

    def ended(self, only: int | None = None) -> list[int]:
        """Wait for all groups to end, or only one; return their exit codes."""
        return [
            process.wait(PATIENCE_S)
            for (group, _), process in self._running.items()
            if only in (None, group)
        ]

    def said(self, group: int, part: int = 0) -> str:
        return (self.folder / f"err-{group}-{part}").read_text()

    def commits(self) -> list[Commit]:
        """All steps that ranks committed, in the order of time."""
        found: list[Commit] = []
        for path in self.digests.glob("*.jsonl"):
            group, rank, _ = path.stem.split("-")
            found += [Commit(int(group), int(rank), **line) for line in _lines(path)]
        return sorted(found, key=lambda commit: commit.at)

    def changes(self, group: int) -> list[dict[str, Any]]:
        return _lines(self.folder / "runs/it" / f"replica-{group}" / CHANGES)

    def present(self, group: int) -> list[int]:
        """The groups that took part in the last step of a group."""
        changes = self.changes(group)
        return changes[-1]["present"] if changes else []

    def close(self) -> None:
        for process in self._running.values():
            kill_tree(process.pid)
            process.wait()
        self.kill_lighthouse()
        for file in self._files:
            file.close()


def _on(host: Host | None, words: list[str]) -> list[str]:
    """The command line of a command on a host; None is this machine."""
    return words if host is None else host.command(*words)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may be written at this moment."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def replica_groups(
    folder: Path,
    groups: int = 3,
    steps: int = 100_000,
    restart: str = "",
    strategy: str = "",
    server: Host | None = None,
) -> Iterator[Groups]:
    """Groups that are not started yet, and a lighthouse; everything ends with the body."""
    made = Groups(folder, groups, steps, restart, strategy, server)
    try:
        made.start_lighthouse()
        yield made
    finally:
        made.close()
