"""A run whose folder is on a full disk: it trains on, and saves again once there is space."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.faults import plant
from tests.command import COMMAND, PATIENCE_S, environment

pytest.importorskip("torch")

STEPS = 100


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory for the folders of runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "full", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


class Run:
    """A run in the background, with what it has said so far."""

    def __init__(self, folder: Path) -> None:
        text = plant.RUN.format(train="checkpoint = { every = 10, keep = 1 }")
        text = text.replace("steps = 30", f"steps = {STEPS}").replace("trackers = []\n", "")
        (folder / "run.toml").write_text(text)
        self._stderr = folder / "stderr"
        with self._stderr.open("w") as stderr, (folder / "stdout").open("w") as stdout:
            self.process = subprocess.Popen(
                [*COMMAND, "train", "run.toml", "--nproc", "2", "--name", "it"],
                cwd=folder,
                env=environment(**{plant.STEP_S: "0.1"}),
                stdout=stdout,
                stderr=stderr,
            )

    def said(self) -> str:
        return self._stderr.read_text()

    def wait_until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, f"ended too early: {self.said()}"
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def used(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def fill(disk: Path) -> bool:
    """Leave no block free; True, as soon as that is so."""
    with (disk / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            return error.errno == errno.ENOSPC


@pytest.mark.nightly
def test_a_run_outlives_a_full_disk(disk: Path, tmp_path: Path) -> None:
    run = Run(tmp_path)
    folder = disk / "it"
    places = folder / "checkpoints"

    def saved() -> list[str]:
        return sorted(path.name for path in places.glob("step-" + "[0-9]" * 8))

    def unfinished() -> list[Path]:
        return list(places.glob("*.unfinished"))

    try:
        run.wait_until(lambda: len(saved()) == 1 and not unfinished())
        (first,) = saved()
        size = sum(path.stat().st_blocks * 512 for path in (places / first).iterdir())
        resize(disk, used(disk) + size // 2)
        run.wait_until(lambda: "not saved" in run.said())
        run.wait_until(lambda: not unfinished())
        run.wait_until(lambda: fill(disk) and "metrics.jsonl" in run.said())
        resize(disk, 64 * 2**20)
        run.wait_until(lambda: saved() not in ([], [first]))
        assert run.process.wait(PATIENCE_S) == 0, run.said()
    finally:
        run.process.kill()
        run.process.wait()
    said = run.said()
    assert "No space left on device" in said
    assert said.count("metrics.jsonl") == 1
    assert "Restarting" not in said
    assert saved() == [f"step-{STEPS:08d}"]
    assert not unfinished()
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps))
    assert len(steps) < STEPS
    assert steps[-1] == STEPS
    assert "[train]" in (folder / "run.toml").read_text()
