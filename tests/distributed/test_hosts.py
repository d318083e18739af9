"""Hosts that fail, leave and join: real runs on network namespaces; all is `benchmarks.hosts`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.hosts.cases import STEPS, Case, Reference, break_run, reference
from benchmarks.hosts.cluster import RUN, STRATEGIES, cluster, wait_until
from benchmarks.lab.network import available
from tests.command import COMMAND, PATIENCE_S, environment
from tests.distributed.launch import free_port

pytest.importorskip("torch")
pytestmark = pytest.mark.nightly
needs_lab = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The end of a run on two hosts that nobody disturbs."""
    if (reason := available()) is not None:
        pytest.skip(reason)
    return reference(tmp_path_factory.mktemp("reference") / "it", (2, "zero3"))


@needs_lab
@pytest.mark.parametrize(
    "fault", ["rank-kill", "power-loss", "server-back", "server-host-back", "spare", "grow"]
)
def test_a_fault_of_a_host_is_survived(fault: str, tmp_path: Path, expected: Reference) -> None:
    outcome = break_run(tmp_path / "it", Case(fault, 2, "zero3", 15), expected)
    assert outcome.survived, outcome.problem
    assert outcome.same_end, outcome.problem
    assert outcome.blamed_right is not False, outcome.problem
    assert outcome.left_over == 0
    assert outcome.open_ports == 0, outcome.problem


@needs_lab
def test_a_stopped_launcher_disturbs_nobody(tmp_path: Path, expected: Reference) -> None:
    """For longer than a silent host is lost; ranks train on, and nobody is blamed."""
    with cluster(tmp_path / "it", 2, "zero3", "2", STEPS, serves=True) as run:
        for number in range(2):
            run.start(number)
        assert run.wait_for_step(10)
        launcher = run.launchers[1]
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(12)
        launcher.send_signal(signal.SIGCONT)
        assert run.ends(), run.said(0) + run.said(1)
        assert run.recoveries() == []
        assert run.state() == expected.state


class Launchers:
    """Launchers of one machine that meet on the loopback, without namespaces."""

    def __init__(self, folder: Path, nodes: str, steps: int) -> None:
        setup = STRATEGIES["zero3"]
        text = RUN.format(
            hosts=2, processes=1, batch=192, strategy=setup.strategy, model=setup.model, steps=steps
        )
        (folder / "run.toml").write_text(text)
        self._folder = folder
        self._variables = {
            "PET_NNODES": nodes,
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
            "PET_RDZV_ID": "two",
            "SHARDWISE_PLANTED_STEP_S": "0.1",
        }

    def start(self, *before: str) -> subprocess.Popen[str]:
        """Start a launcher; `before` are words in front of its command."""
        words = ("train", "run.toml", "--name", "it", "--nproc", "1", "--resume")
        return self._run(*before, *COMMAND, *words)

    def serve(self) -> subprocess.Popen[str]:
        return self._run(*COMMAND, "rendezvous", self._variables["PET_RDZV_ENDPOINT"])

    def is_served(self) -> bool:
        """Whether a launcher serves the rendezvous."""
        address, _, port = self._variables["PET_RDZV_ENDPOINT"].partition(":")
        with socket.socket() as asking:
            return asking.connect_ex((address, int(port))) == 0

    def _run(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words, cwd=self._folder, env=environment(**self._variables), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def steps(self) -> list[int]:
        path = self._folder / "runs/it/metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def test_two_launchers_of_one_machine_shrink_and_grow(tmp_path: Path) -> None:
    """One launcher is killed and comes back."""
    hosts = Launchers(tmp_path, "1:2", steps=200)
    first = hosts.start()
    # Whoever comes first serves the rendezvous; without it nobody could go on.
    assert wait_until(hosts.is_served, PATIENCE_S)
    second = hosts.start()
    assert wait_until(lambda: len(hosts.steps()) > 25, PATIENCE_S)
    second.kill()
    second.communicate()
    assert wait_until(lambda: len(hosts.steps()) > 50, PATIENCE_S)
    second = hosts.start()
    said = [one.communicate(timeout=PATIENCE_S)[1] for one in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert "Hosts join or leave after a checkpoint" in said[0]
    assert "0 steps replayed" in said[0]
    assert hosts.steps() == list(range(1, 201))


def test_a_spare_waits_for_a_run_that_a_signal_stopped(tmp_path: Path) -> None:
    """A scheduler takes one host: all save and stop, and the run continues with the spare."""
    hosts = Launchers(tmp_path, "2", steps=100)
    server = hosts.serve()
    launchers = [hosts.start() for _ in range(3)]
    assert wait_until(lambda: len(hosts.steps()) > 5, PATIENCE_S)
    children = {one: psutil.Process(one.pid).children(recursive=True) for one in launchers}
    [spare] = [
        one for one, found in children.items() if not any(c.name()[:4] == "rank" for c in found)
    ]
    stopped = [one for one in launchers if one is not spare]
    stopped[0].send_signal(signal.SIGTERM)
    said = [one.communicate(timeout=PATIENCE_S)[1] for one in stopped]
    assert [one.returncode for one in stopped] == [143, 143], said
    replaced = hosts.start()
    said = [one.communicate(timeout=PATIENCE_S)[1] for one in (spare, replaced)]
    assert [spare.returncode, replaced.returncode] == [0, 0], said
    assert hosts.steps() == list(range(1, 101))
    late = hosts.start()
    assert "the run is done" in late.communicate(timeout=PATIENCE_S)[1]
    assert late.returncode == 0
    server.terminate()
    server.communicate()


# A mount of its own over the run folder, with the run.toml only.
ALONE = (
    *("unshare", "--mount", "sh", "-c"),
    'cp run.toml /tmp/$$.toml && mount -t tmpfs none "$PWD" && cd "$PWD" && '
    'mv /tmp/$$.toml run.toml && exec "$@"',
    "sh",
)


@needs_lab
def test_a_host_that_cannot_train_does_not_end_the_run(tmp_path: Path) -> None:
    """It does not see the folder of the others: it is told, and they go on without it."""
    hosts = Launchers(tmp_path, "1:2", steps=150)
    first = hosts.start()
    assert wait_until(lambda: len(hosts.steps()) > 5, PATIENCE_S)
    second = hosts.start(*ALONE)
    said = second.communicate(timeout=PATIENCE_S)[1]
    assert second.returncode == 2, said
    assert "set train.checkpoint.to to a folder that all machines can write to" in said
    told = first.communicate(timeout=PATIENCE_S)[1]
    assert first.returncode == 0, told
    assert hosts.steps() == list(range(1, 151))
