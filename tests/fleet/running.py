"""A real training that goes on beside a test, as one process."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.spec.run import write_run
from tests.command import COMMAND, PATIENCE_S, environment
from tests.stacks.runs import tiny

# More than any test waits for.
ENDLESS = 1_000_000


class Running:
    """A training in `folder`, whose run folder is runs/it."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.process, self.run_folder = process, folder / "runs" / "it"

    def logged(self) -> dict[int, dict[str, float]]:
        """The lines of metrics.jsonl by step, as far as they are complete."""
        try:
            lines = (self.run_folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        except OSError:
            return {}
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row for row in rows}

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        """What `condition` returns once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.05)
        return found

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 128 + signal.SIGTERM, said


@contextmanager
def training(folder: Path, **settings: Any) -> Iterator[Running]:
    """Train a small model without end on one CPU process; killed if the test does not stop it."""
    run = tiny(cluster="1x1xCPU", strategy={"kind": "single"}, train={"steps": ENDLESS, **settings})
    (folder / "run.toml").write_text(write_run(run))
    process = subprocess.Popen(
        [*COMMAND, "train", "run.toml", "--name", "it"],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(folder, process)
    finally:
        process.kill()
        process.communicate()
