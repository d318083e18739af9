"""Launchers that meet through a real server on the loopback: rounds, restarts, deadlines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.membership import LEFT, TRAINING, Post
from shardwise.launch.rendezvous_address import bind_address, endpoint, own_address, parse_endpoint
from shardwise.launch.rendezvous_client import RendezvousClient
from shardwise.launch.rendezvous_server import RendezvousServer, serve_if_local
from shardwise.launch.shared_secret import secret_for
from shardwise.pytorch.channel import Secret
from shardwise.spec.record import SpecError
from shardwise.spec.train import RestartSettings
from tests.command import COMMAND, PATIENCE_S, environment

SECRET = Secret("known to the launchers of these tests")
SETTINGS = RestartSettings(lost_after_s=5, join_s=60, last_call_s=1)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    serving = RendezvousServer(("127.0.0.1", 0), SECRET, lost_after_s=5)
    serving.serve_in_background()
    yield serving
    serving.close()


@pytest.fixture
def clients() -> Iterator[Callable[..., RendezvousClient]]:
    made: list[RendezvousClient] = []

    def connect(
        address: Any, name: str, *sizes: int, secret: Secret = SECRET, **fields: Any
    ) -> RendezvousClient:
        post = Post(name, name, "127.0.0.1", 1, sizes, 0.5, **fields)
        made.append(RendezvousClient(address, secret, "run", post, 5))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def test_a_closed_connection_is_a_lost_host(
    server: RendezvousServer, clients: Callable[..., RendezvousClient]
) -> None:
    """At once: nobody waits for a silence."""
    trains = {"state": TRAINING, "round": 1, "size": 2}
    first = clients(server.address, "a", 2, place=0, **trains)
    second = clients(server.address, "b", 2, place=1, **trains)
    wait_for(lambda: (view := first.contact().view) and view.training == 1)
    second.close()
    view = wait_for(lambda: (view := first.contact().view) and view.faults and view)
    [fault] = view.faults
    assert fault.name == "b"
    assert fault.sure


def test_clients_find_a_server_that_was_restarted(clients: Callable[..., RendezvousClient]) -> None:
    serving = RendezvousServer(("127.0.0.1", 0), SECRET, lost_after_s=5)
    serving.serve_in_background()
    address = serving.address
    client = clients(address, "a", 1, state=TRAINING, round=7, place=0, size=1)
    before = wait_for(lambda: client.contact().view)
    serving.close()  # its connections too, as the kernel does for a killed process
    wait_for(lambda: client.contact().problem)
    again = RendezvousServer(address, SECRET, lost_after_s=5)
    again.serve_in_background()
    view = wait_for(
        lambda: (view := client.contact().view) and view.server != before.server and view
    )
    assert view.round == 7
    again.close()


def meet(
    port: int,
    sizes: tuple[int, ...],
    found: list[Any],
    is_done: Callable[[], bool] = lambda: False,
) -> threading.Thread:
    """A launcher's rendezvous in a thread; what comes of it is added to `found`."""
    from shardwise.launch.host_rendezvous import HostRendezvous

    def run() -> None:
        hosts = HostRendezvous("run", 1, sizes, SETTINGS, is_done=is_done)
        try:
            found.append((hosts, hosts.next_rendezvous()))
        except Exception as error:
            found.append((hosts, error))

    os.environ["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_hosts_meet_at_a_store_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them serves. Their ranks are different, the store is one that exists."""
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "")
    found: list[Any] = []
    port = free_port()
    threads = [meet(port, (2,), found), meet(port, (2,), found)]
    for thread in threads:
        thread.join(PATIENCE_S)
    infos = [info for _, info in found]
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    [at] = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
        for info in infos
    }
    dist.TCPStore(*at, is_master=False, wait_for_workers=False).set("key", "value")
    for hosts, _ in found:
        hosts.leave(LEFT)
        hosts.shutdown()


def test_waiting_ends_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "")
    monkeypatch.setattr(f"{__name__}.SETTINGS", SETTINGS.but(join_s=1))
    found: list[Any] = []
    meet(free_port(), (2,), found).join(PATIENCE_S)
    [(hosts, error)] = found
    assert "waiting for hosts: 1 of 2 here" in str(error)
    assert "train.restart.join_s" in str(error)
    hosts.shutdown()


def test_a_host_that_comes_after_the_end_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody of the run is there any more; its folder says that it is done."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "")
    found: list[Any] = []
    meet(free_port(), (2,), found, is_done=lambda: True).join(PATIENCE_S)
    [(hosts, error)] = found
    exits = torch.distributed.elastic.rendezvous.RendezvousGracefulExitError
    assert isinstance(error, exits)
    hosts.shutdown()


def test_hosts_need_a_name_of_their_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a name of its own, each host would wait for others for ever."""
    from shardwise.launch.launcher import _join_hosts

    monkeypatch.delenv("PET_RDZV_ID", raising=False)
    with pytest.raises(SpecError, match="PET_RDZV_ID"):
        _join_hosts(1, (2,), SETTINGS, SECRET, lambda: False)


def test_the_command_serves_without_torch(clients: Callable[..., RendezvousClient]) -> None:
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, "rendezvous", f"127.0.0.1:{port}"],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert f"127.0.0.1:{port}" in process.stderr.readline()
    client = clients(("127.0.0.1", port), "a", 1, secret=secret_for(("127.0.0.1", port), None))
    assert wait_for(lambda: client.contact().view).round == 0
    if sys.platform.startswith("linux"):
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_only_the_host_that_is_named_serves() -> None:
    port = free_port()
    # An address of nobody: reserved for documentation.
    assert serve_if_local(("192.0.2.1", port), SECRET, 5) is None
    first = serve_if_local(("127.0.0.1", port), SECRET, 5)
    assert first is not None
    assert serve_if_local(("127.0.0.1", port), SECRET, 5) is None
    first.close()


def test_addresses() -> None:
    assert parse_endpoint("10.0.0.1:7") == ("10.0.0.1", 7)
    assert parse_endpoint("node-1") == ("node-1", 29400)
    assert parse_endpoint("[::1]:7") == ("::1", 7)
    for wrong in ("", ":7", "node:port"):
        with pytest.raises(SpecError, match="rendezvous"):
            parse_endpoint(wrong)
    assert bind_address(("localhost", 7))[0] in ("127.0.0.1", "::1")
    assert own_address(("127.0.0.1", 7), 1) == "127.0.0.1"


def test_the_backend_of_torchrun_and_ours_name_the_same_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "10.0.0.1:7")
    for backend in ("c10d", "shardwise"):
        monkeypatch.setenv("PET_RDZV_BACKEND", backend)
        assert endpoint() == ("10.0.0.1", 7)
    monkeypatch.setenv("PET_RDZV_BACKEND", "etcd")
    with pytest.raises(SpecError, match="PET_RDZV_BACKEND"):
        endpoint()
