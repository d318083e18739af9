"""Restarts and recoveries as the supervisor decides, records and reports them."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")

from shardwise.launch import heartbeat
from shardwise.launch.heartbeat import Heartbeat
from shardwise.launch.supervisor import PEER_LOST, Supervisor
from shardwise.spec.train import RestartSettings
from tests.screens import assert_screen

NOBODY = 2**22 + 1  # larger than any process id


class Clock:
    """A monotonic clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in ("supervisor", "hang_detector"):
            monkeypatch.setattr(f"shardwise.launch.{module}.time.monotonic", lambda: self.now)
        monkeypatch.setattr("shardwise.launch.hang_detector.time.sleep", lambda _: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def supervise(tmp_path: Path, **settings: Any) -> tuple[Supervisor, Path]:
    beats = tmp_path / "beats"
    beats.mkdir()
    supervisor = Supervisor(beats, tmp_path, 2, RestartSettings.read(settings))
    supervisor.start_attempt()
    return supervisor, beats


def beat(folder: Path, now: float, rank: int, step: int, section: str, **fields: float) -> None:
    one = Heartbeat(rank, NOBODY, step, -1, -1, 0, 0.0, now, now + 10, now + 30, section)
    one = one._replace(**fields)  # type: ignore[arg-type]
    data = heartbeat._LAYOUT.pack(*one[:-1], section.encode())
    (folder / f"rank-{rank}").write_bytes(data)


def recorded(folder: Path) -> dict[str, Any]:
    [line] = (folder / "recoveries.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_death_is_detected_since_the_rank_was_last_seen_alive(
    tmp_path: Path, clock: Clock
) -> None:
    supervisor, beats = supervise(tmp_path)
    for rank in (0, 1):
        beat(beats, clock.now, rank, 16, "step", saved=10)
    clock.now += 50
    supervisor.all_alive()
    clock.now += 0.37
    supervisor.add_failures({1: -signal.SIGKILL})
    assert supervisor.should_restart()
    supervisor.finish()
    assert recorded(tmp_path)["detect_s"] == pytest.approx(0.37)


def hang(supervisor: Supervisor, beats: Path, clock: Clock) -> None:
    """Let rank 1 hang, so that both are killed and restarted."""
    beat(beats, clock.now, 1, 16, "data")
    beat(beats, clock.now + 1, 0, 16, "step")
    for _ in range(31):
        clock.now += 1
        supervisor.all_alive()
        supervisor.poll()
    supervisor.add_failures({0: -9, 1: -9})
    assert supervisor.should_restart()
    supervisor.finish()


def test_a_hang_is_detected_since_its_last_heartbeat(tmp_path: Path, clock: Clock) -> None:
    supervisor, beats = supervise(tmp_path)
    hang(supervisor, beats, clock)
    assert recorded(tmp_path)["detect_s"] == pytest.approx(31)


def test_a_failure_on_another_machine_has_no_detection_time(tmp_path: Path, clock: Clock) -> None:
    supervisor, beats = supervise(tmp_path)
    beat(beats, clock.now, 0, 16, "step")
    assert supervisor.should_restart()
    supervisor.finish()
    assert "detect_s" not in recorded(tmp_path)


@pytest.mark.parametrize("code", [2, 3])
def test_a_permanent_failure_is_not_restarted(tmp_path: Path, clock: Clock, code: int) -> None:
    supervisor, _ = supervise(tmp_path)
    assert supervisor.add_failures({0: code})
    assert not supervisor.should_restart()


def test_lost_peers_wait_for_the_rank_that_they_lost(tmp_path: Path, clock: Clock) -> None:
    supervisor, _ = supervise(tmp_path)
    assert not supervisor.add_failures({0: PEER_LOST})
    clock.now += 1
    assert supervisor.add_failures({0: PEER_LOST, 1: -11})
    assert supervisor.first_failure() == (1, -11)


def test_signals_are_forwarded_once_every_rank_trains(tmp_path: Path) -> None:
    supervisor, beats = supervise(tmp_path)
    now = time.monotonic()
    beat(beats, now, 0, 1, "step")
    assert not supervisor.is_training()
    beat(beats, now, 1, 0, "start")
    assert not supervisor.is_training()
    beat(beats, now, 1, 1, "data")
    assert supervisor.is_training()


def test_the_messages_of_a_recovery(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill, a hang during the recovery, and the end of both; then attempts run out."""
    supervisor, beats = supervise(tmp_path, attempts=2)
    for rank in (0, 1):
        beat(beats, clock.now, rank, 16, "step", saved=10)
    clock.now += 0.1
    supervisor.add_failures({1: -9})
    assert supervisor.should_restart()
    supervisor.start_attempt()
    beat(beats, clock.now, 0, 12, "step", loaded=10, ready_at=clock.now)
    beat(beats, clock.now, 1, 12, "data", loaded=10, ready_at=clock.now)
    clock.now += 1
    supervisor.poll()
    clock.now += 31
    # The detector itself was suspended for so long: it grants that time to the ranks.
    supervisor.poll()
    for _ in range(31):
        clock.now += 1
        supervisor.poll()
    supervisor.add_failures({0: -9, 1: -9})
    assert supervisor.should_restart()
    supervisor.start_attempt()
    for rank in (0, 1):
        beat(beats, clock.now, rank, 16, "step", loaded=10, ready_at=clock.now + 2)
    clock.now += 4
    supervisor.poll()
    found = recorded(tmp_path)
    assert (found["failed_step"], found["loaded_step"], found["replayed_steps"]) == (16, 10, 5)
    assert found["load_s"] == pytest.approx(2)
    assert found["regained_s"] == pytest.approx(4)
    supervisor.add_failures({0: 1})
    assert not supervisor.should_restart()
    text = capsys.readouterr().err.replace(str(tmp_path), "runs/it")
    assert_screen("train-recoveries", re.sub(r"pid \d+", "pid 4242", text))


def test_a_folder_that_cannot_be_written_costs_the_records_only(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hang and two deaths: all are told, and the supervisor goes on."""
    supervisor, beats = supervise(tmp_path)
    # A name that cannot be opened, and one that is no folder: refused for root too.
    (tmp_path / "recoveries.jsonl").mkdir()
    (tmp_path / "hangs").write_text("in the way")
    hang(supervisor, beats, clock)
    supervisor.finish()
    said = capsys.readouterr().err
    assert said.count("Stacks: not written") == 1
    assert said.count("recoveries.jsonl") == 1
