"""Hang detection from heartbeats."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise.launch import heartbeat
from shardwise.launch.hang_detector import HangDetector
from shardwise.launch.heartbeat import Heartbeat, read_heartbeats, report, section, start_heartbeat
from shardwise.launch.supervisor import Supervisor
from shardwise.spec.train import RestartSettings
from tests.command import PATIENCE_S

NOBODY = 2**22 + 1  # larger than any process number


def write_heartbeat(
    folder: Path, rank: int, step: int, what: str, ago: float, allowed: float, pid: int = NOBODY
) -> None:
    """As a rank would that entered a section so long ago and is killed after so long."""
    now = time.monotonic()
    since = now - ago
    one = Heartbeat(
        rank, pid, step, -1, -1, 0, 0.0, since, since + allowed / 3, since + allowed, what
    )
    data = heartbeat._LAYOUT.pack(*one[:-1], what.encode())
    (folder / f"rank-{rank}").write_bytes(data)


def test_whoever_is_furthest_behind_hangs(tmp_path: Path) -> None:
    for rank in (0, 2):
        write_heartbeat(tmp_path, rank, 7, "step", ago=12, allowed=30)
    write_heartbeat(tmp_path, 1, 7, "data", ago=12, allowed=30)
    hang, pids = HangDetector(tmp_path).poll()
    assert hang is not None
    assert hang.ranks == [1]
    assert hang.waiting == [0, 2]
    assert pids == []


def test_it_is_told_once_and_killed_later(tmp_path: Path) -> None:
    detector = HangDetector(tmp_path)
    write_heartbeat(tmp_path, 0, 7, "step", ago=12, allowed=30)
    assert detector.poll()[0] is not None
    assert detector.poll() == (None, [])
    write_heartbeat(tmp_path, 0, 7, "step", ago=31, allowed=30)
    assert detector.poll() == (None, [NOBODY])
    write_heartbeat(tmp_path, 0, 8, "step", ago=0, allowed=30)
    assert detector.poll() == (None, [])
    assert not detector.is_hanging


def test_whoever_was_killed_for_a_hang_is_told_as_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is dying is no longer stopped, and may be looked at before it has ended."""
    monkeypatch.setattr("shardwise.launch.hang_detector._STOPPED_S", 0.1)
    beats = tmp_path / "beats"
    beats.mkdir()
    supervisor = Supervisor(beats, tmp_path, 2, RestartSettings())
    supervisor.start_attempt()
    with subprocess.Popen(["sleep", "60"]) as stopped:
        write_heartbeat(beats, 0, 7, "step", ago=0, allowed=30)
        write_heartbeat(beats, 1, 7, "step", ago=0, allowed=30, pid=stopped.pid)
        stopped.send_signal(signal.SIGSTOP)
        until = time.monotonic() + PATIENCE_S
        while os.waitid(os.P_PID, stopped.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < until
            supervisor.poll()
            time.sleep(0.05)
        supervisor.poll()
    supervisor.add_failures({0: -9, 1: -9})
    assert supervisor.should_restart()
    supervisor.finish()
    recovery = json.loads((tmp_path / "recoveries.jsonl").read_text())
    assert recovery["failed_step"] == 7
    assert recovery["cause"] == (tmp_path / "hangs/attempt-1/summary.txt").read_text().strip()
    assert supervisor.first_failure() == (1, -9)


def test_those_who_wait_for_a_slow_one_wait_as_long_as_it_may(tmp_path: Path) -> None:
    """Rank 0 writes a log line to a slow tracker; the others are in the next step already."""
    write_heartbeat(tmp_path, 0, 7, "log", ago=60, allowed=1800)
    write_heartbeat(tmp_path, 1, 8, "agree", ago=60, allowed=30)
    assert HangDetector(tmp_path).poll() == (None, [])


def test_time_in_which_nobody_ran_counts_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole job was suspended for a minute and more; what it does then is watched again."""
    now = [1000.0]
    monkeypatch.setattr("shardwise.launch.hang_detector.time.monotonic", lambda: now[0])
    detector = HangDetector(tmp_path)
    write_heartbeat(tmp_path, 0, 7, "step", ago=1, allowed=30)
    assert detector.poll() == (None, [])
    now[0] += 100
    assert detector.poll() == (None, [])
    now[0] += 0.1
    assert detector.poll() == (None, [])
    seen = []
    for _ in range(12):
        now[0] += 1
        seen.append(detector.poll()[0] is not None)
    assert seen.index(True) == 8  # named after ten seconds, of which one was before


def test_what_was_never_done_before_may_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 40 seconds is no hang when it is the first of which the time is learned."""
    now = [1000.0]
    monkeypatch.setattr("shardwise.launch.heartbeat.time.monotonic", lambda: now[0])
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_writer", None)
    start_heartbeat(3, RestartSettings(named_after_s=1, killed_after_s=2, slow_after_s=100))

    def allowed() -> float:
        [one] = read_heartbeats(tmp_path)
        return one.kill_at - one.since

    report(step=5, saved=4)
    with section("step", slow=True):
        assert allowed() == pytest.approx(100)
    with section("step"):
        assert allowed() == pytest.approx(100)
        now[0] += 40
        [one] = read_heartbeats(tmp_path)
        assert (one.rank, one.pid, one.step, one.saved) == (3, os.getpid(), 5, 4)
    with section("step"):
        assert allowed() == pytest.approx(400)  # ten times what it took
    with section("data"), section("agree"):
        assert read_heartbeats(tmp_path)[0].section == "agree"
    assert read_heartbeats(tmp_path)[0].section == "start"


def test_a_section_is_known_by_its_longest_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long part of a step lies between two inner sections, one of which is slow for once."""
    now = [1000.0]
    monkeypatch.setattr("shardwise.launch.heartbeat.time.monotonic", lambda: now[0])
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_writer", None)
    start_heartbeat(0, RestartSettings(named_after_s=1, killed_after_s=2, slow_after_s=100))

    def allowed() -> tuple[str, float]:
        [one] = read_heartbeats(tmp_path)
        return one.section, one.kill_at - one.since

    def step() -> Iterator[tuple[str, float]]:
        with section("step"):
            with section("data"):
                now[0] += 0.001
            yield allowed()
            now[0] += 4
            with section("copy", slow=True):
                now[0] += 60
            yield allowed()
            now[0] += 0.5

    assert list(step()) == [("step", 100), ("step", 100)]  # nothing is known yet
    assert list(step()) == [("step", 40), ("step", 40)]  # ten times 4 s, neither 0.5 s nor 64.5 s


def test_a_failed_section_ends_with_the_one_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_writer", None)
    start_heartbeat(0, RestartSettings())
    with section("step"), suppress(ZeroDivisionError), section("save"):
        raise ZeroDivisionError
    assert read_heartbeats(tmp_path)[0].section == "start"


def test_whoever_fails_says_so_in_its_last_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_writer", None)
    start_heartbeat(0, RestartSettings())
    with pytest.raises(ZeroDivisionError), section("save"):
        raise ZeroDivisionError
    assert read_heartbeats(tmp_path)[0].section == "save"
