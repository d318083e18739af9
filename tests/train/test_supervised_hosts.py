"""What a supervisor does with its own ranks, given what the other hosts do."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shardwise.launch.membership import Fault
from shardwise.launch.supervisor import PEER_LOST, RESIZED, Supervisor
from shardwise.spec.train import RestartSettings
from tests.train.test_hang_detector import write_heartbeat

WAITS = 'Current thread 0x1:\n  File "/torch/distributed/distributed_c10d.py", line 1 in wait\n'
COMPUTES = 'Current thread 0x1:\n  File "/model.py", line 1 in forward\n'


class Others:
    """Other hosts, as the test says they are."""

    name = "here"
    blamed: Fault | None = None

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.is_behind: str | None = ""
        self.grows = False
        self.failures: list[tuple[str, bool]] = []

    def report_progress(self, step: int, section: str, waits: bool) -> None:
        self.progress = (step, section, waits)

    def report_failure(self, cause: str, lost_peer: bool) -> None:
        self.failures.append((cause, lost_peer))

    def faults(self) -> Sequence[Fault]:
        return () if self.fault is None else (self.fault,)

    def can_grow(self) -> bool:
        return self.grows

    def can_leave(self) -> bool:
        return self.grows

    def behind(self) -> str | None:
        return self.is_behind


class Watched:
    """One rank, a process of its own, under a supervisor with other hosts."""

    def __init__(self, folder: Path, rank: subprocess.Popen[bytes]) -> None:
        self.folder, self.rank, self.others = folder, rank, Others()
        self.beats = folder / "beats"
        self.beats.mkdir()
        settings = RestartSettings(lost_after_s=1)
        self.supervisor = Supervisor(self.beats, folder, 1, settings, self.others)
        self.supervisor.start_attempt()

    def beat(
        self, ago: float, stack: str = "", step: int = 7, section: str = "step", rank: int = 0
    ) -> None:
        write_heartbeat(self.beats, rank, step, section, ago, allowed=30, pid=self.rank.pid)
        (self.beats / "stacks-0").write_text(stack)

    def is_killed(self) -> bool:
        """Whether the supervisor kills it now: who was killed answers nothing."""
        self.supervisor.poll()
        return not answers(self.rank)


def answers(rank: subprocess.Popen[bytes]) -> bool:
    assert rank.stdin is not None
    assert rank.stdout is not None
    try:
        rank.stdin.write(b".")
        rank.stdin.flush()
    except BrokenPipeError:
        return False
    return rank.stdout.read(1) == b"."


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    # The signal by which stacks are asked for would end `cat`.
    command = ["sh", "-c", "trap '' USR2; exec cat"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as rank:
        assert answers(rank)
        yield Watched(tmp_path, rank)
        rank.kill()


@pytest.mark.parametrize(
    ("stack", "behind", "killed"),
    [
        (WAITS, "another host in step 7", False),
        (WAITS, None, False),  # the server cannot be reached: nobody knows
        (WAITS, "", True),  # all hosts wait: nobody will go on
        (COMPUTES, "another host in step 7", True),
    ],
)
def test_a_rank_that_waits_for_another_host_is_not_killed(
    watched: Watched, stack: str, behind: str | None, killed: bool
) -> None:
    watched.others.is_behind = behind
    watched.beat(ago=90, stack=stack)
    assert watched.is_killed() == killed
    assert watched.others.progress == (7, "step", stack == WAITS)


def test_a_silent_host_alone_is_no_reason_to_kill(watched: Watched) -> None:
    """Its launcher may be stopped, or its link to the server down, while all ranks train."""
    watched.others.fault = Fault("there", "no sign of life", sure=False)
    watched.beat(ago=1)
    assert not watched.is_killed()
    watched.beat(ago=25, stack=WAITS)
    assert watched.is_killed()
    watched.supervisor.add_failures({0: -9})
    assert watched.supervisor.should_restart()
    assert watched.others.failures == [("host there: no sign of life", True)]


def test_a_host_that_failed_is_waited_for_in_vain(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.launch.supervisor._PEER_LOST_S", 0.3)
    watched.others.fault = Fault("there", "rank 1 was killed by signal 9", sure=True)
    watched.beat(ago=1)
    assert not watched.is_killed()
    while not watched.is_killed():
        time.sleep(0.05)


def test_hosts_join_at_a_checkpoint(watched: Watched) -> None:
    watched.others.grows = True
    watched.beat(ago=1, step=0, section="start")
    watched.supervisor.poll()
    assert not (watched.beats / "resize").exists()  # nothing to save yet
    watched.beat(ago=1)
    watched.supervisor.poll()
    assert (watched.beats / "resize").exists()
    assert not watched.supervisor.add_failures({0: RESIZED})  # others may still save
    assert watched.supervisor.should_restart()
    assert watched.others.failures == []


def test_only_a_host_whose_ranks_failed_by_themselves_says_so(watched: Watched) -> None:
    watched.beat(ago=1)
    watched.supervisor.add_failures({0: PEER_LOST})
    assert watched.supervisor.should_restart()
    watched.supervisor.start_attempt()
    watched.supervisor.add_failures({0: -9})
    assert watched.supervisor.should_restart()
    assert [lost_peer for _, lost_peer in watched.others.failures] == [True, False]


@pytest.mark.parametrize(("code", "attempts"), [(-9, 3), (PEER_LOST, 6)])
def test_a_host_that_only_lost_others_outlasts_them(
    watched: Watched, code: int, attempts: int
) -> None:
    """Of a host that cannot train and one that can, the first gives up."""
    watched.beat(ago=1)
    restarts = 0
    while True:
        watched.supervisor.add_failures({0: code})
        if not watched.supervisor.should_restart():
            break
        restarts += 1
        watched.supervisor.start_attempt()
    assert restarts == attempts


def test_the_blamed_host_is_recorded(watched: Watched) -> None:
    watched.beat(ago=1)
    watched.supervisor.add_failures({0: PEER_LOST})
    assert watched.supervisor.should_restart()
    watched.others.blamed = Fault("there", "its launcher ended", sure=True)
    watched.supervisor.start_attempt()
    watched.supervisor.finish()
    [recovery] = map(json.loads, (watched.folder / "recoveries.jsonl").read_text().splitlines())
    assert (recovery["blamed_host"], recovery["host"]) == ("there", "here")


def test_one_host_records_a_fault_of_all(watched: Watched) -> None:
    """The one with rank 0: in a folder that all share, the others would count it again."""
    watched.beat(ago=1, rank=3)
    watched.supervisor.add_failures({3: PEER_LOST})
    assert watched.supervisor.should_restart()
    watched.supervisor.finish()
    assert not (watched.folder / "recoveries.jsonl").exists()


def test_hosts_that_join_are_no_fault(watched: Watched) -> None:
    watched.beat(ago=1)
    watched.supervisor.add_failures({0: RESIZED})
    assert watched.supervisor.should_restart()
    watched.supervisor.finish()
    assert not (watched.folder / "recoveries.jsonl").exists()
