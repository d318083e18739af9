"""A stranger on the network of a run of two launchers: it changes nothing, and is reported.

It knows the address of the rendezvous and the ID of the run, hears every byte of a launcher, can
repeat and add bytes in its connection, and opens as many connections as it likes. It does not know
the secret of the run.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.hosts.cluster import RUN, STRATEGIES
from shardwise.launch.membership import Post
from shardwise.launch.refusals import Reason
from shardwise.launch.rendezvous_server import GREETING
from shardwise.launch.shared_secret import FILE, VARIABLE
from shardwise.pytorch.channel import Secret
from tests.command import COMMAND, PATIENCE_S, environment
from tests.distributed.launch import free_port
from tests.distributed.watched_model import FOLDER

pytest.importorskip("torch")

RUN_ID, STEPS = "known-to-all", 24
# Of an early version, whose server believed everybody.
TAKE_OVER = {"host": "evil", "name": "evil", "address": "127.0.0.1", "processes": 1, "sizes": [2],
             "last_call_s": 0.0, "state": "training", "round": 10**12, "place": 0, "size": 2,
             "port": 1}  # fmt: skip
ESCAPES = "\x1b[2J\x1b]0;owned\x07"


class Tap:
    """Passes a launcher's bytes on to the server, and keeps them; can repeat its last message."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard: list[bytes] = []
        self._there: socket.socket | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def repeat(self) -> None:
        """Send the launcher's last message again, in its own connection."""
        assert self._there is not None
        self._there.sendall(self.heard[-1])

    def _listen(self) -> None:
        while True:
            here, _ = self._listener.accept()
            self._there = socket.create_connection(self._server)
            for ends in ((here, self._there, True), (self._there, here, False)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, keeps: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if keeps:
                    self.heard.append(data)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def say_to(server: tuple[str, int], speak: Callable[[bytes], bytes]) -> bool:
    """Connect, answer the server's random bytes, and see whether it closes without a word."""
    with socket.create_connection(server, timeout=PATIENCE_S) as connection:
        lines = connection.makefile("rb")
        challenge = bytes.fromhex(lines.readline().removeprefix(GREETING).decode())
        with suppress(OSError):  # the server may close before all of it is sent
            connection.sendall(speak(challenge))
        with suppress(ConnectionResetError):
            return lines.read() == b""
    return True


def guessed(state: str) -> Callable[[bytes], bytes]:
    """A proof and a post as a launcher sends them, with a secret that was guessed."""

    def speak(challenge: bytes) -> bytes:
        hello = msgspec.json.encode([RUN_ID, "evil", secrets.token_hex(16)])
        channel = Secret(RUN_ID * 3).channel(challenge, hello, serves=False)
        post = Post(**{**TAKE_OVER, "state": state, "failure": ESCAPES})  # type: ignore[arg-type]
        return channel.seal(hello) + channel.seal(msgspec.json.encode((1, post)))

    return speak


def posted(**fields: object) -> bytes:
    message = {"run": RUN_ID, "number": 1, "post": TAKE_OVER | fields}
    return json.dumps(message).encode() + b"\n"


def attack(server: tuple[str, int]) -> None:
    """Take over the run, end it, fail it, in both ways of speaking."""
    for state in ("training", "done", "failed"):
        message = posted(state=state, failure=ESCAPES)
        assert say_to(server, lambda _, message=message: message)  # type: ignore[misc]
        assert say_to(server, guessed(state))
    assert say_to(server, lambda _: posted(round=float("inf"), name={}, size=1e30))


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[str, int, int], Path]:
    """Makes folders with the same run, for a number of hosts and processes of each."""

    def make(name: str, hosts: int, processes: int) -> Path:
        folder = tmp_path / name
        (folder / "unpickled").mkdir(parents=True)
        text = RUN.format(
            hosts=hosts, processes=processes, batch=192, steps=STEPS,
            strategy=STRATEGIES["zero3"].strategy, model='"tests.distributed.watched_model:plain"',
        )  # fmt: skip
        (folder / "run.toml").write_text(text)
        return folder

    return make


def start(
    stack: ExitStack, folder: Path, processes: int, **variables: str
) -> subprocess.Popen[str]:
    words = ("train", "run.toml", "--name", "it", "--nproc", str(processes), "--resume")
    variables = {FOLDER: str(folder / "unpickled"), "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=folder, env=environment(**variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    stack.callback(process.kill)
    return process


def lines_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "runs/it/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def end_of(folder: Path) -> tuple[list[float], dict[str, bytes]]:
    """The losses of all steps, and every byte of the last checkpoint but its times."""
    [*_, last] = sorted((folder / "runs/it/checkpoints").glob("step-*"))
    kept = {one.name: one.read_bytes() for one in last.iterdir() if one.name != "manifest.json"}
    return [line["loss"] for line in lines_of(folder)], kept


def wait_until(condition: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        for one in processes:
            assert one.poll() is None, one.communicate()
        time.sleep(0.02)


def is_served(server: tuple[str, int]) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(server) == 0


def test_a_stranger_changes_nothing(folders: Callable[[str, int, int], Path]) -> None:
    attacked, alone = folders("attacked", 2, 1), folders("alone", 1, 2)
    server, secret = ("127.0.0.1", free_port()), secrets.token_hex(32)
    tap = Tap(server)
    file = attacked.parent / "secret"
    file.touch(0o600)
    file.write_text(secret)
    shared = {"PET_NNODES": "2", "PET_RDZV_ID": RUN_ID, "SHARDWISE_PLANTED_STEP_S": "0.15"}
    with ExitStack() as stack:
        undisturbed = start(stack, alone, 2)
        first = start(
            stack, attacked, 1,
            **shared, PET_RDZV_ENDPOINT=f"127.0.0.1:{server[1]}", **{FILE: str(file)},
        )  # fmt: skip
        wait_until(lambda: is_served(server), first)
        attack(server)  # while a host waits
        second = start(
            stack, attacked, 1, **shared, PET_RDZV_ENDPOINT=tap.address, **{VARIABLE: secret}
        )
        wait_until(lambda: len(lines_of(attacked)) > 2, first, second)
        attack(server)
        heard = b"".join(tap.heard)
        assert say_to(server, lambda _: heard)
        tap.repeat()
        crowd = [stack.enter_context(socket.create_connection(server)) for _ in range(400)]
        assert say_to(server, lambda _: b"x" * 2**20)
        check_secret(secret, [first, second])
        said = [one.communicate(timeout=PATIENCE_S) for one in (first, second, undisturbed)]
        assert len(crowd) == 400
    assert [one.returncode for one in (first, second, undisturbed)] == [0, 0, 0], said
    assert end_of(attacked) == end_of(alone)
    assert not (attacked / "runs/it/recoveries.jsonl").exists()
    for reason in (Reason.NO_SECRET, Reason.FORGED, Reason.CROWD, Reason.TOO_LONG):
        assert any("127.0.0.1:" in line and reason in line for line in said[0][1].splitlines()), (
            reason
        )
    assert "\x1b" not in "".join(text for pair in said for text in pair)
    written = [path for path in attacked.rglob("*") if path.is_file()]
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert secret not in str(said)
    notes = list(attacked.glob("unpickled/rank-*"))
    assert sorted(path.name for path in notes) == ["rank-0", "rank-1"]
    assert [path.read_text() for path in notes] == ["", ""]


def check_secret(secret: str, launchers: list[subprocess.Popen[str]]) -> None:
    """No process has it in its command, and no rank in its environment."""
    ranks = 0
    for launcher in launchers:
        process = psutil.Process(launcher.pid)
        for one in (process, *process.children(recursive=True)):
            assert secret not in " ".join(one.cmdline())
            if one.pid != launcher.pid:
                ranks += one.name().startswith("rank ")
                assert secret not in one.environ().values()
    assert ranks == 2
