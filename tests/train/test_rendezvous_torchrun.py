"""The rendezvous under torchrun, called as torch's agent calls it, with a real server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shardwise.launch.rendezvous_server import RendezvousServer
from shardwise.launch.shared_secret import VARIABLE
from shardwise.pytorch.channel import Secret
from tests.command import PATIENCE_S

elastic = pytest.importorskip("torch.distributed.elastic.rendezvous")
SECRET = "known to the hosts of these tests only"


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    serving = RendezvousServer(("127.0.0.1", 0), Secret(SECRET), lost_after_s=5)
    serving.serve_in_background()
    yield serving
    serving.close()


@pytest.fixture
def start(server: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the rendezvous of a host as torchrun does, from its options."""
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def make(least: int, most: int, secret: str = SECRET, **conf: str) -> Any:
        monkeypatch.setenv(VARIABLE, secret)
        endpoint = f"127.0.0.1:{server.address[1]}"
        parameters = elastic.RendezvousParameters(
            "shardwise", endpoint, "run", least, most, timeout=900, last_call_s="1", **conf
        )
        return get_rendezvous_handler(parameters)

    return make


def meet(*hosts: Any) -> list[Any]:
    """The rounds of hosts that wait at the same time."""
    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(lambda host: host.next_rendezvous(), hosts))


def in_background(work: Callable[[], Any]) -> Future[Any]:
    threads = ThreadPoolExecutor(1)
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future


def must_restart(*hosts: Any) -> None:
    """Wait until torch would restart the ranks of each host."""
    deadline = time.monotonic() + PATIENCE_S
    left = list(hosts)
    while left:
        assert time.monotonic() < deadline, "no host restarts its ranks"
        left = [host for host in left if not host.num_nodes_waiting()]
        time.sleep(0.05)


def end(*hosts: Any) -> None:
    with ThreadPoolExecutor(len(hosts)) as threads:
        list(threads.map(lambda host: host.shutdown(), hosts))


def test_hosts_join_fail_and_end_together(
    start: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = start(1, 3), start(1, 3)
    infos = meet(first, second)
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
    assert first.use_agent_store
    infos[0].store.set("of one", "for all")
    assert infos[1].store.get("of one") == b"for all"
    # A new host: all learn of it before one of them restarts.
    third = start(1, 3)
    joins = in_background(third.next_rendezvous)
    must_restart(first, second)
    infos = [*meet(first, second), joins.result(PATIENCE_S)]
    assert {info.world_size for info in infos} == {3}
    assert "Blamed" not in capfd.readouterr().err
    # Nobody has told torch to restart the ranks of the third host: they have failed.
    joins = in_background(third.next_rendezvous)
    must_restart(first, second)
    infos = [*meet(first, second), joins.result(PATIENCE_S)]
    assert {info.world_size for info in infos} == {3}
    said = capfd.readouterr().err
    assert said.count(f"Blamed: host {third.name}: its ranks failed") == 3
    end(first, second, third)


def test_a_spare_takes_a_place_and_ends_with_the_others(start: Callable[..., Any]) -> None:
    hosts = [start(2, 2) for _ in range(2)]
    at = {info.rank: info.bootstrap_store_info for info in meet(*hosts)}
    spare, other = start(2, 2), start(2, 2)
    waits = [in_background(one.next_rendezvous) for one in (spare, other)]
    time.sleep(1.5)  # longer than hosts take to learn of each other
    assert [host.num_nodes_waiting() for host in hosts] == [0, 0]
    kept, lost = hosts
    lost._client.close()
    must_restart(kept)
    assert kept.next_rendezvous().world_size == 2
    deadline = time.monotonic() + PATIENCE_S
    while not any(one.done() for one in waits):
        assert time.monotonic() < deadline, "no spare takes the place"
        time.sleep(0.05)
    joined, left = ((spare, other), (other, spare))[not waits[0].done()]
    info = waits[joined is other].result()
    # Where dead ranks have left their addresses, nobody meets again.
    assert info.bootstrap_store_info != at[0]
    end(kept, joined)
    with pytest.raises(SystemExit) as ended:
        waits[left is other].result(PATIENCE_S)
    assert ended.value.code == 0
    left.shutdown()


def test_hosts_that_are_too_few_end_with_the_reason(start: Callable[..., Any]) -> None:
    first, second = start(2, 2), start(2, 2)
    meet(first, second)
    try:
        raise RuntimeError("as torch's agent does, if no restart is left")
    except RuntimeError:
        first.shutdown()
    must_restart(second)
    with pytest.raises(elastic.RendezvousClosedError, match="its ranks failed"):
        second.next_rendezvous()
    second.shutdown()


def test_a_host_without_the_secret_stays_out(start: Callable[..., Any]) -> None:
    stranger = start(1, 1, secret="x" * 32, join_s="1")
    with pytest.raises(elastic.RendezvousTimeoutError, match="secret") as refused:
        stranger.next_rendezvous()
    assert "(--rdzv-conf join_s)" in str(refused.value)
    stranger.shutdown()


def test_ranks_do_not_inherit_the_secret(start: Callable[..., Any]) -> None:
    host = start(1, 1)
    assert VARIABLE not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"]
    host.shutdown()


def refusal(endpoint: str, capfd: pytest.CaptureFixture[str], **conf: str) -> str:
    """What torchrun prints before it ends."""
    from shardwise.launch.torchrun_entry import make_rendezvous

    parameters = elastic.RendezvousParameters("shardwise", endpoint, "run", 2, 2, **conf)
    with pytest.raises(SystemExit) as ended:
        make_rendezvous(parameters)
    assert ended.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    return line


def test_what_is_missing_or_wrong_is_one_sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    told = refusal("192.0.2.1:29400", capfd)
    assert told.startswith(f"error: {VARIABLE}: hosts that meet at 192.0.2.1 need a secret;")
    told = refusal("127.0.0.1:1", capfd, join_timeout="3")
    assert "--rdzv-conf.join_timeout: unknown key" in told
    assert "join_s" in told
    assert "--rdzv-conf.join_s: must be a number" in refusal("127.0.0.1:1", capfd, join_s="soon")
