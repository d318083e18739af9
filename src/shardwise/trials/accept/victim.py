"""A training run whose ranks can be killed, and the state that it leaves at its end."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from shardwise.launch.child import python_command

NAME = "it"


class KillableRun:
    """A run of `folder/run.toml`, started by `command`; later attempts resume it.

    `patience_s` returns the most seconds that a wait may take.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], patience_s: Callable[[], float]
    ) -> None:
        self._folder, self._command = folder, list(command)
        self._patience_s = patience_s
        self._out: IO[str] = (folder / "out.txt").open("a")
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[str]:
        """Start the command of the run with more arguments."""
        return subprocess.Popen(
            [*self._command, *more],
            cwd=self._folder,
            env={**os.environ, "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def resume(self) -> None:
        """Start the run again, from its last checkpoint."""
        self.process = self._start("--resume")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def step(self) -> int:
        """The last completed step; 0 before the first."""
        try:
            lines = (self._run / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def kill(self, rank: int) -> bool:
        """Kill the process of a rank; return whether it was running."""
        import psutil

        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if is_rank(child, rank):
                        child.kill()
                        return True
        return False

    def wait_for_step(self, step: int) -> bool:
        """Wait until a step is complete; return whether the run reached it."""
        deadline = time.monotonic() + self._patience_s()
        while self.step() < step:
            if time.monotonic() > deadline or not self.running:
                return self.step() >= step
            time.sleep(0.02)
        return True

    def end(self) -> int:
        """Wait for the end of the run and return its exit code; kill it if the wait is too long."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self._patience_s())
        self.close()
        return self.process.returncode

    def close(self) -> None:
        """Kill the run if it still runs, and close its output."""
        self.kill_all()
        self._out.close()

    def kill_all(self) -> None:
        """Kill the launcher and all ranks."""
        from shardwise.launch.launcher import kill_tree

        if self.running:
            kill_tree(self.process.pid)
            self.process.wait()

    def log(self) -> str:
        """The output of all attempts."""
        return (self._folder / "out.txt").read_text(errors="replace")

    def state(self) -> dict[str, Any]:
        """The bytes of the last checkpoint by file, and all losses as (step, loss).

        Raises OSError without a checkpoint.
        """
        lines = (self._run / "metrics.jsonl").read_text().splitlines()
        checkpoints = self._run / "checkpoints"
        last = max(checkpoints.iterdir())
        return {
            **{f"{last.name}/{path.name}": path.read_bytes() for path in last.glob("rank-*")},
            "losses": [(one["step"], one["loss"]) for one in map(json.loads, lines)],
        }

    @property
    def _run(self) -> Path:
        return self._folder / "runs" / NAME


def is_rank(process: Any, rank: int) -> bool:
    """Whether a process is this rank: by its name, or by RANK in its environment (torchrun)."""
    return bool(process.name() == f"rank {rank}" or process.environ().get("RANK") == str(rank))


def train_command(processes: int) -> list[str]:
    """The command that trains the run.toml in the current folder."""
    words = ["train", "run.toml", "--name", NAME, "--nproc", str(processes)]
    return python_command("-m", "shardwise", *words)
