"""`torchrun --rdzv-backend shardwise` with a script of plain PyTorch, on hosts that fail."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.hosts.cluster import wait_until
from benchmarks.lab.network import Host, available, hosts, kill_processes
from shardwise.launch.shared_secret import VARIABLE
from tests.command import COMMAND, PATIENCE_S, ROOT, environment
from tests.distributed.launch import free_port

torch = pytest.importorskip("torch")
SCRIPT = Path(__file__).with_name("plain_ddp.py")
# Torch's agents wait for each other at the end; for so long, if they do not share a store.
BARRIER_S = 300


def documented_command() -> list[str]:
    """The words of the command that the documentation shows."""
    page = (ROOT / "docs/how-to/survive.md").read_text()
    [command] = [
        block for block in page.replace("\\\n", " ").splitlines()
        if block.startswith("torchrun --rdzv-backend shardwise")
    ]  # fmt: skip
    return shlex.split(command)


class Training:
    """Launchers of one run."""

    def __init__(self, folder: Path, endpoint: str, steps: int) -> None:
        self._folder, self._steps = folder, steps
        given = {"--rdzv-endpoint": endpoint, "--nproc-per-node": "1"}
        before, *words = documented_command()
        assert before == "torchrun"
        assert words.pop() == "train.py"
        for name, value in given.items():
            words[words.index(name) + 1] = value
        self._words = [
            *(sys.executable, "-m", "torch.distributed.run", *words),
            *(str(SCRIPT), str(folder), str(steps)),
        ]
        self._variables = {VARIABLE: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
        self.launchers: list[subprocess.Popen[bytes]] = []
        # While it exists, steps are slow: there is time for what a test does meanwhile.
        self.brake = folder / "slow"

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.launchers:  # those of a test that failed
            if one.poll() is None:
                one.terminate()
                one.wait(PATIENCE_S)

    def start(self, host: Host | None = None) -> None:
        self.launchers.append(self.run(host, f"{len(self.launchers)}", *self._words))

    def run(self, host: Host | None, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.txt").open("wb") as output:
            return subprocess.Popen(
                words if host is None else host.command(*words),
                env=environment(**self._variables), cwd=self._folder,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        """What rank 0 has written after each step."""
        path = self._folder / "steps.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: any(line["step"] >= step for line in self.lines()))

    def wait(self, condition: Callable[[], bool]) -> None:
        assert wait_until(condition, PATIENCE_S), self.said()

    def said(self) -> list[str]:
        """What the launchers and their ranks have printed."""
        return [(self._folder / f"{n}.txt").read_text() for n in range(len(self.launchers))]

    def check_end(self, *lost: int) -> list[str]:
        """Wait for the end; the losses must be those of the whole batches on one process."""
        self.brake.unlink(missing_ok=True)
        self.wait_for_step(self._steps - 1)
        began = time.monotonic()
        codes = {n: one.wait(PATIENCE_S) for n, one in enumerate(self.launchers) if n not in lost}
        assert time.monotonic() - began < BARRIER_S
        assert set(codes.values()) == {0}, self.said()
        lines = self.lines()
        assert {line["world"] for line in lines} == {2}
        losses = {line["step"]: line["loss"] for line in lines}
        assert list(losses) == list(range(self._steps))
        assert list(losses.values()) == pytest.approx(losses_of_one_process(self._steps), rel=1e-4)
        return self.said()


def losses_of_one_process(steps: int) -> list[float]:
    from tests.distributed.plain_ddp import batch, new_model, new_optimizer

    model, losses = new_model(), []
    optimizer = new_optimizer(model)
    for step in range(steps):
        inputs, targets = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_documented_command_trains_on_two_launchers(tmp_path: Path) -> None:
    with Training(tmp_path, f"127.0.0.1:{free_port()}", steps=12) as training:
        for _ in range(2):
            training.start()
        said = training.check_end()
    assert "exit barrier" not in str(said)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[Training, list[Host]]]:
    """A run that is not started on three hosts, which are network namespaces.

    A fourth one serves the rendezvous.
    """
    if (reason := available()) is not None:
        pytest.skip(reason)
    with hosts(4, None, "tor") as (*others, server):
        endpoint = f"{server.address}:29400"
        training = Training(tmp_path, endpoint, steps=300)
        training.run(server, "server", *COMMAND, "rendezvous", endpoint)
        yield training, others


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root")


@pytest.mark.nightly
@needs_root
def test_two_hosts_that_nobody_disturbs(lab: tuple[Training, list[Host]]) -> None:
    training, places = lab
    for host in places[:2]:
        training.start(host)
    assert "shardwise:" not in str(training.check_end())


@pytest.mark.nightly
@needs_root
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_place_of_a_killed_host(
    lost: int, lab: tuple[Training, list[Host]]
) -> None:
    training, places = lab
    training.brake.touch()
    for host in places[:2]:
        training.start(host)
    training.wait_for_step(0)
    training.start(places[2])
    training.wait(lambda: "this host is a spare: 2 hosts train" in training.said()[2])
    training.wait_for_step(12)
    kill_processes([places[lost]])
    said = training.check_end(lost)
    for number in {0, 1, 2} - {lost}:
        assert blame(places[lost]) in said[number]
    # Training went on from the checkpoint after step 9, or from a later one.
    assert [line["step"] for line in training.lines()].count(9) == 1


@pytest.mark.nightly
@needs_root
def test_the_host_of_a_killed_rank_is_blamed(lab: tuple[Training, list[Host]]) -> None:
    """The rank of the other host fails too, some milliseconds later."""
    training, places = lab
    training.brake.touch()
    for host in places[:2]:
        training.start(host)
    training.wait_for_step(12)
    [rank] = psutil.Process(training.launchers[1].pid).children()
    rank.kill()
    for text in training.check_end():
        assert f"{blame(places[1])}: a rank was killed by signal 9" in text


def blame(host: Host) -> str:
    return f"Blamed: host {os.uname().nodename} ({host.address})"
