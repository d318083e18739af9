"""Labs of network namespaces: links keep their rate, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.lab import network
from benchmarks.lab.network import hosts, set_rate, sweep
from benchmarks.lab.transfer import transfer_rate

ROOT = Path(__file__).resolve().parents[2]
REASON = network.available()
pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

# Builds a lab with a process on a host, says so, and waits.
BUILDER = """
import signal, subprocess, sys, time
from benchmarks.lab.network import hosts

# A shell lets what it runs in the background ignore this one.
signal.signal(signal.SIGINT, signal.default_int_handler)
with hosts(2, 1e9, sys.argv[1]) as made:
    sleeper = subprocess.Popen(made[1].command("sleep", "1000"), start_new_session=True)
    time.sleep(0.1)
    print(sleeper.pid, flush=True)
    time.sleep(1000)
"""


def named(name: str) -> list[str]:
    """Namespaces of labs of that name, in any process."""
    folder = Path("/run/netns")
    start = f"{network.PREFIX}-{name}-"
    found = folder.iterdir() if folder.is_dir() else []
    return [entry.name for entry in found if entry.name.startswith(start)]


def own(name: str) -> str:
    """A name that no other run of these tests uses."""
    return f"{name}-{os.getpid()}"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def builder(name: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has built a lab, and the process that it has started on one of its hosts."""
    command = [sys.executable, "-c", BUILDER, name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def link_rate(sender: network.Host, receiver: network.Host) -> float:
    """Of so many transfers that a busy moment of the machine does not decide."""
    return transfer_rate(sender, receiver, 0.5, times=7)


def test_links_keep_the_rate_they_are_set_to() -> None:
    with hosts(2, 250e6, own("rate")) as made:
        one, other = made
        assert link_rate(one, other) == pytest.approx(250e6, rel=0.1)
        assert link_rate(other, one) == pytest.approx(250e6, rel=0.1)
        for rate in (1e9, 2e9):
            set_rate(made, rate)
            assert link_rate(one, other) == pytest.approx(rate, rel=0.1)
        set_rate(made, None)
        assert transfer_rate(one, other, 0.5, times=1) > 2.5e9


def test_the_receiving_link_limits_too() -> None:
    with hosts(2, None, own("receive")) as (sender, receiver):
        set_rate([receiver], 500e6)
        assert link_rate(sender, receiver) == pytest.approx(500e6, rel=0.1)


def test_ranks_of_one_host_do_not_pass_its_link() -> None:
    with hosts(1, 250e6, own("local")) as (host,):
        assert transfer_rate(host, host, seconds=0.5, times=1) > 2.5e9


def test_nothing_is_left_after_success() -> None:
    name = own("success")
    with hosts(3, 1e9, name) as made:
        assert len(named(name)) == 4
        sleeper = subprocess.Popen(made[0].command("sleep", "1000"))
    assert not named(name)
    assert sleeper.wait(timeout=5) == -signal.SIGKILL


def test_nothing_is_left_after_an_exception() -> None:
    name = own("exception")
    with pytest.raises(RuntimeError, match="on purpose"), hosts(2, 1e9, name):
        raise RuntimeError("on purpose")
    assert not named(name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    name = own("signal")
    with builder(name) as (process, sleeper):
        assert len(named(name)) == 3
        process.send_signal(number)
        assert process.wait(timeout=10) != 0
    assert not named(name)
    assert not is_running(sleeper)


def test_the_next_lab_removes_what_a_killed_one_left() -> None:
    name = own("killed")
    with builder(name) as (process, sleeper):
        assert not [space for space in sweep() if space in named(name)]
        process.kill()
        process.wait(timeout=10)
        assert len(named(name)) == 3
        assert is_running(sleeper)
    with hosts(1, None, own("next")):
        assert not named(name)
        assert not is_running(sleeper)


def test_labs_stand_side_by_side() -> None:
    name = own("beside")
    with hosts(1, None, name), hosts(1, None, name):
        assert len(named(name)) == 4
    assert not named(name)
