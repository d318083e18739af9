"""[train.profile]: which steps, what stays on disk, and the analysis beside a run."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run, write_run
from shardwise.spec.train import TrainSettings
from shardwise.trainer.analysis import Analyses, shares
from tests.command import PATIENCE_S

pytest.importorskip("torch")
from torch.profiler import ProfilerAction

from shardwise.trainer.profile import remove_old, windows_of

LETTERS = {
    ProfilerAction.NONE: ".",
    ProfilerAction.WARMUP: "w",
    ProfilerAction.RECORD: "r",
    ProfilerAction.RECORD_AND_SAVE: "s",
}


def schedule(start: int = 0, **train: Any) -> str:
    """What the profiler does in each step, a letter for each."""
    settings = TrainSettings.read(train, where="train")
    windows = windows_of(settings, start)
    assert windows is not None
    return "".join(LETTERS[windows.action(step)] for step in range(1, settings.steps + 1))


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"profile": {"after": 8}}, ".......wrrs....."),
        ({"profile": {"after": 8, "steps": 1}}, ".......ws......."),
        # Traffic is measured in step 3 and memory in step 5: the profiler waits for both.
        ({"profile": {"after": 1}}, ".....wrrs......."),
        ({"profile": {"after": 1}, "measure": False}, ".wrrs..........."),
        ({"profile": {"after": 6, "every": 4}}, ".....ws..ws..ws."),
        ({"profile": {"after": 6, "every": 6, "steps": 3}}, ".....wrrs..wrrs."),
        # A window that would be cut off by the end is left out.
        ({"profile": {"after": 6, "every": 8, "steps": 3}}, ".....wrrs......."),
        # Windows are where `after` and `every` say, also if the first of them comes too early.
        ({"profile": {"after": 3, "every": 5}}, ".......ws...ws.."),
    ],
)
def test_which_steps_are_profiled(train: dict[str, Any], expected: str) -> None:
    assert schedule(steps=16, **train) == expected


def test_a_run_that_starts_in_its_middle_keeps_its_windows() -> None:
    train: dict[str, Any] = {"steps": 40, "profile": {"after": 10, "every": 10}}
    whole, later = schedule(**train), schedule(start=17, **train)
    assert later[:23] == "." * 23
    assert later[23:] == whole[23:]


def test_timings_leave_out_warm_up_profiled_steps_and_the_writing() -> None:
    windows = windows_of(TrainSettings.read({"steps": 20, "profile": {"after": 8, "every": 7}}))
    assert windows is not None
    disturbed = [step for step in range(1, 21) if windows.position(step) is not None]
    assert disturbed == [8, 9, 10, 15, 16, 17]


def test_nothing_is_profiled_unasked() -> None:
    assert windows_of(TrainSettings()) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"evry": 5}, r"train\.profile\.evry: unknown key; did you mean 'every'"),
        ({"every": 3}, r"train\.profile: .*at least 4"),
        ({"every": 5, "steps": 3}, r"train\.profile: .*at least 6"),
        ({"ranks": "al"}, "'al' is not one of all, first; did you mean 'all'"),
        ({"after": 0}, r"train\.profile\.after: must be at least 1"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrainSettings.read({"profile": fields}, where="train")


def test_a_run_too_short_says_how_long_it_must_be() -> None:
    settings = TrainSettings.read({"steps": 8, "profile": {"after": 2}})
    with pytest.raises(SpecError, match="steps 7 to 9 would be profiled.*at least 9"):
        windows_of(settings)
    assert windows_of(settings.but(steps=9)) is not None


def test_the_section_survives_being_written(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "llama-3.2-1b"\ncluster = "1x2xCPU"\n[train.profile]\nevery = "1k"\nkeep = 0\n'
    )
    run = read_run(file)
    assert run.train is not None
    assert run.train.profile is not None
    assert (run.train.profile.every, run.train.profile.keep) == (1000, 0)
    (tmp_path / "again.toml").write_text(write_run(run))
    assert read_run(tmp_path / "again.toml").train == run.train


def test_the_oldest_windows_go_first(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(folder.name for folder in tmp_path.iterdir())

    for step in (8, 999_998, 999_999, 1_000_000):
        (tmp_path / f"step-{step:06}").mkdir()
        (tmp_path / f"step-{step:06}" / "rank0.json.gz").touch()
    remove_old(tmp_path, 0)
    assert len(names()) == 4
    remove_old(tmp_path, 2, busy=[tmp_path / "step-000008"])
    assert names() == ["step-000008", "step-1000000", "step-999999"]
    remove_old(tmp_path, 2)
    assert names() == ["step-1000000", "step-999999"]


def test_shares_are_means_over_ranks_of_the_marked_steps() -> None:
    def part(compute: int, exposed: int, idle: int) -> dict[str, int]:
        return {
            "compute_ns": compute,
            "exposed_communication_ns": exposed,
            "exposed_copy_ns": 0,
            "idle_ns": idle,
            "window_ns": compute + exposed + idle,
        }

    marked = {**part(9, 0, 991), "overlap": 0.5, "steps": [part(50, 25, 25), part(70, 15, 15)]}
    unmarked: dict[str, Any] = {**part(20, 60, 20), "overlap": None, "steps": []}
    found = shares({"ranks": [marked, unmarked]}, 123)
    assert found == pytest.approx(
        {
            "profile_step": 123,
            "profile_compute": (0.6 + 0.2) / 2,
            "profile_exposed": (0.2 + 0.6) / 2,
            "profile_idle": 0.2,
            "profile_overlap": 0.5,
        }
    )


def test_an_analysis_that_fails_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(b"no trace")
    analyses = Analyses(1)
    with caplog.at_level(logging.WARNING, "shardwise"):
        analyses.start(tmp_path, 7)
        assert analyses.busy == [tmp_path]
        assert analyses.drain(60) == []
    assert len(caplog.messages) == 1
    assert "step 7" in caplog.text
    assert "rank0.json.gz" in caplog.text
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel of Linux")
def test_an_analysis_dies_with_its_run(tmp_path: Path) -> None:
    # It waits for a trace that never comes.
    program = (
        "import os, sys, time; from pathlib import Path\n"
        "from shardwise.trainer.analysis import Analyses\n"
        "analyses = Analyses(1); analyses.start(Path(sys.argv[1]), 7)\n"
        "print(analyses._running.process.pid, flush=True); time.sleep(1.5); os._exit(9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    deadline = time.monotonic() + PATIENCE_S
    while _lives(done.stdout.strip()):
        assert time.monotonic() < deadline, "the analysis was left behind"
        time.sleep(0.05)


def _lives(process: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
