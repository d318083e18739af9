"""The fault matrix: all useful pairs of a fault and a moment, and the expected result of each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults import plant
from benchmarks.faults.damage import DAMAGES, evil_mark

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """
checkpoint = { every = 10, keep = 3, to = "TO" }
restart = { named_after_s = NAMED, killed_after_s = KILLED, slow_after_s = SLOW }
"""
MOMENTS = (
    "before save",
    "during shard write",
    "before commit",
    "after commit",
    "during load",
    "mid-step",
)
PROCESS_FAULTS = ("SIGKILL", "SIGTERM", "SIGSTOP", "exception", "segfault", "sleep", "slow")


class Case(NamedTuple):
    """A fault and its moment."""

    fault: str
    moment: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.moment}"


class Outcome(NamedTuple):
    """The result of a case. `told` is the run's message; `problems` lists deviations."""

    case: Case
    exit_code: int
    told: str
    loaded_step: int | None
    equal: bool
    problems: list[str]


def all_cases() -> list[Case]:
    found = [Case(fault, moment) for fault in PROCESS_FAULTS for moment in MOMENTS]
    # Only a step or a load can be slow.
    found = [c for c in found if c.fault != "slow" or c.moment in ("mid-step", "during load")]
    found.append(Case("NaN gradient", "mid-step"))
    io_moments = ("during shard write", "before commit", "during load", "mid-step")
    found += [Case("EIO", moment) for moment in io_moments]
    found += [Case("ENOSPC", "during shard write")]
    return [*found, *(Case(damage, "after commit") for damage in DAMAGES)]


class Matrix:
    """Runs cases in a folder and compares each with an undisturbed reference run.

    `patience` multiplies the limits after which a rank counts as hung, for busy machines.
    """

    def __init__(self, folder: Path, patience: int = 1) -> None:
        self._folder, self._patience = folder, patience
        self._reference = self._case_folder("reference")
        done = self._train(self._reference)
        assert done.returncode == 0, done.stderr
        self._end = _state(self._reference)

    def run(self, case: Case) -> Outcome:
        folder = self._case_folder(str(case).replace(" ", "-").replace("`../`", "outside"))
        try:
            if case.fault in DAMAGES:
                return self._damaged(case, folder)
            if case.fault == "ENOSPC":
                return self._full(case, folder)
            return self._planted(case, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # ---- three kinds of faults ------------------------------------------------

    def _planted(self, case: Case, folder: Path) -> Outcome:
        mark = folder / "mark"
        rank = 0 if "commit" in case.moment else 1
        moment = "data" if case.fault == "NaN gradient" else case.moment
        fault = {plant.FAULT: f"{case.fault}@{moment}:{rank}", plant.MARK: str(mark)}
        resume = case.moment == "during load"
        if resume:
            self._half_way(folder)
        done = self._train(folder, resume=resume, **fault)
        problems = [] if mark.exists() else ["the fault did not happen"]
        recoveries = _recoveries(folder)
        # An I/O error of one rank while it loads ends all ranks: they say whose it was.
        reads = case == Case("EIO", "during load")
        told = _line(done.stderr, "error:") if reads else _sentence(done.stderr)
        told = told.replace(str(folder / "ckpt" / "it"), "…")
        loaded = recoveries[-1].get("loaded_step") if recoveries else None
        expected = 20 if case.moment in ("after commit", "during load") else 10
        stops = case.fault == "SIGTERM" and case.moment != "during load"
        if case.fault == "NaN gradient":
            return self._not_a_number(case, folder, done, problems)
        if stops:
            problems += _unless(done.returncode == 143, f"exit code {done.returncode}, not 143")
            again = self._train(folder, resume=True)
            problems += _unless(again.returncode == 0, again.stderr[-300:])
            told, loaded = _line(done.stdout, "Stopped"), _loaded(again.stdout)
        elif case.fault == "slow":
            problems += _unless(not recoveries, "a false alarm")
            told = "none: the run is only slow"
        elif case == Case("exception", "during load"):
            told, loaded = _line(done.stdout, "Skipped"), _loaded(done.stdout)
            problems += _unless(f"rank {rank}" in told, f"no culprit in {told!r}")
            problems += _unless(loaded == 10, f"loaded step {loaded}, not 10")
        elif self._fails_a_save(case):
            problems += _unless("not saved" in done.stderr, "the failed save was not reported")
            told = _line(done.stderr, "not saved")
        else:
            problems += _unless(f"rank {rank}" in told, f"no culprit in {told!r}")
            problems += _unless(loaded == expected, f"loaded step {loaded}, not {expected}")
        if not stops:
            problems += _unless(done.returncode == 0, f"exit code {done.returncode}")
        if problems:
            problems.append(f"recoveries {recoveries}; stderr: {done.stderr[-2000:]}")
        return self._judged(case, folder, done.returncode, told, loaded, problems)

    @staticmethod
    def _fails_a_save(case: Case) -> bool:
        """Whether an exception fails a save but not the run."""
        writes = ("during shard write", "before commit", "after commit")
        return case.fault in ("EIO", "exception") and case.moment in writes

    def _not_a_number(
        self, case: Case, folder: Path, done: subprocess.CompletedProcess[str], problems: list[str]
    ) -> Outcome:
        """The run must stop and leave a checkpoint of step 10 equal to an undisturbed run's."""
        problems += _unless(done.returncode == 3, f"exit code {done.returncode}, not 3")
        told = _line(done.stderr, "not finite")
        problems += _unless(bool(told), "not reported")
        steps = sorted(path.name for path in (folder / "ckpt/it").glob("step-*"))
        problems += _unless(steps == ["step-00000010"], f"left {steps}")
        same = _files(folder, 10) == _files(self._reference, 10)
        problems += _unless(same, "step 10 differs from an undisturbed run")
        return Outcome(case, done.returncode, told, 10, same, problems)

    def _damaged(self, case: Case, folder: Path) -> Outcome:
        self._half_way(folder)
        steps = folder / "ckpt" / "it"
        culprit = DAMAGES[case.fault](steps / "step-00000020", steps / "step-00000010")
        checked = _shardwise(folder, "fsck", str(steps / "step-00000020"))
        problems = _unless(checked.returncode == 1, f"fsck: exit code {checked.returncode}, not 1")
        done = self._train(folder, resume=True)
        told, loaded = _line(done.stdout, "Skipped"), _loaded(done.stdout)
        problems += _unless(done.returncode == 0, f"exit code {done.returncode}: {done.stderr}")
        problems += _unless(culprit in told, f"no {culprit} in {told!r}")
        problems += _unless(loaded == 10, f"loaded step {loaded}, not 10")
        problems += _unless(not evil_mark(steps / "x").exists(), "code in the checkpoint ran")
        return self._judged(case, folder, done.returncode, told, loaded, problems)

    def _full(self, case: Case, folder: Path) -> Outcome:
        """A file system with space for one and a half checkpoints."""
        disk = folder / "ckpt"
        disk.mkdir()
        size = sum(len(data) for data in _files(self._reference, 10).values())
        room = (size * 3 // 2) // 4096 * 4096 + 16384
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "full", disk], check=True)
        try:
            done = self._train(folder)
            told = _line(done.stderr, "No space left")
            problems = _unless(done.returncode == 1, f"exit code {done.returncode}, not 1")
            problems += _unless("rank" in told, f"no culprit in {told!r}")
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            again = self._train(folder, resume=True)
            loaded = _loaded(again.stdout)
            problems += _unless(again.returncode == 0, again.stderr[-300:])
            problems += _unless(loaded == 10, f"loaded step {loaded}, not 10")
            return self._judged(case, folder, done.returncode, told, loaded, problems)
        finally:
            subprocess.run(["umount", disk], check=False)

    # ---- shared parts -------------------------------------------------------------------

    def _judged(
        self,
        case: Case,
        folder: Path,
        code: int,
        told: str,
        loaded: int | None,
        problems: list[str],
    ) -> Outcome:
        equal = _state(folder) == self._end
        problems += _unless(equal, "the result differs from an undisturbed run")
        return Outcome(case, code, told, loaded, equal, problems)

    def _case_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        settings = SETTINGS.replace("TO", str(folder / "ckpt"))
        for word, seconds in (("NAMED", 2), ("KILLED", 4), ("SLOW", 8)):
            settings = settings.replace(word, str(seconds * self._patience))
        (folder / "run.toml").write_text(plant.RUN.format(train=settings))
        return folder

    def _half_way(self, folder: Path) -> None:
        """Copy the reference as it was after step 20."""
        for part in ("runs", "ckpt"):
            shutil.copytree(self._reference / part, folder / part)
        shutil.rmtree(folder / "ckpt" / "it" / "step-00000030")

    def _train(
        self, folder: Path, resume: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        words = ["train", "run.toml", "--nproc", "2", "--name", "it"]
        return _shardwise(folder, *words, *(["--resume"] if resume else []), **variables)


def _shardwise(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "400", "NO_COLOR": "1", **variables},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def _files(folder: Path, step: int) -> dict[str, bytes]:
    found = (folder / "ckpt" / "it" / f"step-{step:08d}").glob("rank-*")
    return {path.name: path.read_bytes() for path in found}


def _state(folder: Path) -> tuple[dict[str, bytes], list[tuple[int, float]]]:
    """Every byte of the last checkpoint (parameters, optimizer, RNG states) and every loss."""
    metrics = (folder / "runs" / "it" / "metrics.jsonl").read_text().splitlines()
    losses = [(one["step"], one["loss"]) for one in map(json.loads, metrics)]
    return _files(folder, 30), losses


def _recoveries(folder: Path) -> list[dict[str, Any]]:
    file = folder / "runs" / "it" / "recoveries.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _sentence(stderr: str) -> str:
    return _line(stderr, "Restarting").removesuffix(". Restarting")


def _line(text: str, words: str) -> str:
    return next((line.strip() for line in text.splitlines() if words in line), "")


def _loaded(stdout: str) -> int | None:
    found = re.search(r"Resuming from step (\d+)", stdout)
    return int(found[1]) if found else None


def _unless(right: bool, problem: str) -> list[str]:
    return [] if right else [problem]


def run_cases(cases: list[Case]) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        matrix = Matrix(Path(folder))
        for case in cases:
            yield matrix.run(case)
