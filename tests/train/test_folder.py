"""The folder of a run: one process trains in it, whatever its file system can do."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import write_run
from shardwise.trainer import folder as run_folder
from shardwise.trainer.folder import lock_folder, replace_text
from tests.command import environment, refusal
from tests.stacks.runs import tiny

HOLD = """
import pathlib, sys
from shardwise.trainer.folder import lock_folder, replace_text
held = lock_folder(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_told_who_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_LOCKED_S", 0.3)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SpecError, match=f"process {other.pid} of .* trains in this folder"):
            lock_folder(tmp_path)
        other.kill()
    with lock_folder(tmp_path) as mine:
        mine.seek(0)
        assert f"process {os.getpid()} of " in mine.read()


def test_the_lock_of_another_host_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server keeps it for a while after that host was lost."""
    monkeypatch.setattr(run_folder, "_LOCKED_S", 0.0)
    with lock_folder(tmp_path) as theirs:
        theirs.truncate(0)
        theirs.write("process 7 of another-host\n")
        theirs.flush()
        tried = []

        def released(seconds: float) -> None:
            tried.append(seconds)
            if len(tried) == 20:
                fcntl.flock(theirs, fcntl.LOCK_UN)

        monkeypatch.setattr("shardwise.trainer.folder.time.sleep", released)
        lock_folder(tmp_path).close()
    assert len(tried) == 20


def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock_folder(tmp_path).close()
    assert "has no locks" in capsys.readouterr().err


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 1\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            replace_text(file, "steps = 2\n")
        lock_folder(tmp_path).close()  # whose name does not fit either
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_text() == "steps = 1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "run.toml"]


@pytest.mark.parametrize("name", ["../../x", "a/b", "/x", "..", "", "a\\b", "a\nb", "\u202ea"])
def test_a_name_is_no_path(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(write_run(tiny(train={"folder": str(tmp_path / "deep" / "runs")})))
    (sentence,) = refusal("train", str(file), "--name", name)
    assert "train.folder" in sentence
    assert os.listdir(tmp_path) == ["run.toml"]


def test_the_id_of_a_rendezvous_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run on several hosts that has no name, it is part of the folder's."""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_RDZV_ID", "../../x")
    file = tmp_path / "run.toml"
    file.write_text(write_run(tiny(train={"folder": str(tmp_path / "deep" / "runs")})))
    (sentence,) = refusal("train", str(file))
    assert "train.folder" in sentence
    assert os.listdir(tmp_path) == ["run.toml"]
