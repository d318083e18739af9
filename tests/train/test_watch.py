"""Who hangs, by what ranks have said of themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise.spec.train import RestartSettings
from shardwise.train import heartbeat
from shardwise.train.heartbeat import Beat, beat, read_beats, section, start_heart
from shardwise.train.supervisor import Supervisor
from shardwise.train.watch import Watch

NOBODY = 2**22 + 1  # larger than any process number


def say(
    folder: Path, rank: int, step: int, what: str, ago: float, allowed: float, pid: int = NOBODY
) -> None:
    """As a rank would that entered a section so long ago and is killed after so long."""
    now = time.monotonic()
    since = now - ago
    one = Beat(rank, pid, step, -1, -1, 0, 0.0, since, since + allowed / 3, since + allowed, what)
    data = heartbeat._LAYOUT.pack(*one[:-1], what.encode())
    (folder / f"rank-{rank}").write_bytes(data)


def test_whoever_is_furthest_behind_hangs(tmp_path: Path) -> None:
    for rank in (0, 2):
        say(tmp_path, rank, 7, "step", ago=12, allowed=30)
    say(tmp_path, 1, 7, "data", ago=12, allowed=30)
    hang, doomed = Watch(tmp_path).look()
    assert hang is not None
    assert hang.culprits == [1]
    assert "step 7, section 'data', since 12 s; waiting for it: rank 0, 2" in hang.sentence
    assert doomed == []


def test_it_is_told_once_and_killed_later(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    say(tmp_path, 0, 7, "step", ago=12, allowed=30)
    assert watch.look()[0] is not None
    assert watch.look() == (None, [])
    say(tmp_path, 0, 7, "step", ago=31, allowed=30)
    assert watch.look() == (None, [NOBODY])
    say(tmp_path, 0, 8, "step", ago=0, allowed=30)
    assert watch.look() == (None, [])
    assert not watch.worried


def test_whoever_was_killed_for_a_hang_is_told_as_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that is dying is no longer stopped, and may be looked at before it has ended."""
    monkeypatch.setattr("shardwise.train.watch._STOPPED_S", 0.1)
    beats = tmp_path / "beats"
    beats.mkdir()
    supervisor = Supervisor(beats, tmp_path, 2, RestartSettings())
    supervisor.begin()
    with subprocess.Popen(["sleep", "60"]) as stopped:
        say(beats, 0, 7, "step", ago=0, allowed=30)
        say(beats, 1, 7, "step", ago=0, allowed=30, pid=stopped.pid)
        stopped.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 30
        while os.waitid(os.P_PID, stopped.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < until
            supervisor.look()
            time.sleep(0.05)
        supervisor.look()
    supervisor.failed({0: -9, 1: -9})
    assert supervisor.again()
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"rank 1 (process {stopped.pid}) is stopped by a signal in step 7" in told
    assert told.endswith("starting again")


def test_those_who_wait_for_a_slow_one_wait_as_long_as_it_may(tmp_path: Path) -> None:
    """Rank 0 writes a log line to a slow tracker; the others are in the next step already."""
    say(tmp_path, 0, 7, "log", ago=60, allowed=1800)
    say(tmp_path, 1, 8, "agree", ago=60, allowed=30)
    assert Watch(tmp_path).look() == (None, [])


def test_time_in_which_nobody_ran_counts_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole job was suspended for a minute and more; what it does then is watched again."""
    now = [1000.0]
    monkeypatch.setattr("shardwise.train.watch.time.monotonic", lambda: now[0])
    watch = Watch(tmp_path)
    say(tmp_path, 0, 7, "step", ago=1, allowed=30)
    assert watch.look() == (None, [])
    now[0] += 100
    assert watch.look() == (None, [])
    now[0] += 0.1
    assert watch.look() == (None, [])
    seen = []
    for _ in range(12):
        now[0] += 1
        seen.append(watch.look()[0] is not None)
    assert seen.index(True) == 8  # named after ten seconds, of which one was before


def test_what_was_never_done_before_may_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 40 seconds is no hang when it is the first of which the time is learned."""
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_heart", None)
    start_heart(3, RestartSettings(named_after_s=1, killed_after_s=2, slow_after_s=100))

    def allowed() -> float:
        [one] = read_beats(tmp_path)
        return one.killed_at - one.since

    beat(step=5, saved=4)
    with section("step", slow=True):
        assert allowed() == pytest.approx(100)
    with section("step"):
        assert allowed() == pytest.approx(100)
        time.sleep(0.5)
        [one] = read_beats(tmp_path)
        assert (one.rank, one.pid, one.step, one.saved) == (3, os.getpid(), 5, 4)
    with section("step"):
        assert 5 <= allowed() < 20  # ten times what it took
    with section("data"), section("agree"):
        assert read_beats(tmp_path)[0].section == "agree"
    assert read_beats(tmp_path)[0].section == "start"


def test_a_section_is_known_by_its_longest_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long part of a step lies between two inner sections, one of which is slow for once."""
    now = [1000.0]
    monkeypatch.setattr("shardwise.train.heartbeat.time.monotonic", lambda: now[0])
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_heart", None)
    start_heart(0, RestartSettings(named_after_s=1, killed_after_s=2, slow_after_s=100))

    def allowed() -> tuple[str, float]:
        [one] = read_beats(tmp_path)
        return one.section, one.killed_at - one.since

    def step() -> Iterator[tuple[str, float]]:
        with section("step"):
            with section("data"):
                now[0] += 0.001
            yield allowed()
            now[0] += 4
            with section("settle", slow=True):
                now[0] += 60
            yield allowed()
            now[0] += 0.5

    assert list(step()) == [("step", 100), ("step", 100)]  # nothing is known yet
    assert list(step()) == [("step", 40), ("step", 40)]  # ten times 4 s, neither 0.5 s nor 64.5 s


def test_a_failed_section_ends_with_the_one_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_heart", None)
    start_heart(0, RestartSettings())
    with section("step"), suppress(ZeroDivisionError), section("save"):
        raise ZeroDivisionError
    assert read_beats(tmp_path)[0].section == "start"


def test_whoever_fails_says_so_in_its_last_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(heartbeat, "_heart", None)
    start_heart(0, RestartSettings())
    with pytest.raises(ZeroDivisionError), section("save"):
        raise ZeroDivisionError
    assert read_beats(tmp_path)[0].section == "save"
