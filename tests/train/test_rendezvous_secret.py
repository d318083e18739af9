"""A rendezvous among strangers: what they send is refused and reported, and changes nothing."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwise.launch import rendezvous_server
from shardwise.launch.membership import (
    DONE,
    FAILED,
    TRAINING,
    WAITING,
    Fault,
    InvalidPostError,
    Membership,
    Post,
    View,
)
from shardwise.launch.refusals import Reason, Refusals
from shardwise.launch.rendezvous_client import RendezvousClient
from shardwise.launch.rendezvous_server import GREETING, RendezvousServer
from shardwise.launch.shared_secret import (
    FILE,
    VARIABLE,
    secret_for,
    take_secret,
)
from shardwise.pytorch.channel import Channel, ForgedError, Secret
from shardwise.spec.record import SpecError
from tests.command import PATIENCE_S

TEXT = "0123456789abcdef" * 4
SECRET = Secret(TEXT)
POST = Post("a", "node-a", "127.0.0.1", 1, (2,), 0.0)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return found


# ---- messages ------------------------------------------------------------------------------------


def channels(secret: Secret = SECRET, challenge: bytes = b"c" * 16) -> tuple[Channel, Channel]:
    """Both sides of a connection: the launcher's with this secret, and the server's."""
    host = secret.channel(challenge, b"hello", serves=False)
    return host, SECRET.channel(b"c" * 16, b"hello", serves=True)


def test_messages_of_holders_arrive() -> None:
    host, server = channels()
    for body in (b"", b"one", b'{"a": "b c"}'):
        assert server.open(host.seal(body)) == body
        assert host.open(server.seal(body)) == body


@pytest.mark.parametrize(
    "forge",
    {
        "of another secret": lambda: channels(Secret("x" * 32))[0].seal(b"a"),
        "of another connection": lambda: channels(challenge=b"d" * 16)[0].seal(b"a"),
        "changed": lambda: channels()[0].seal(b"a").replace(b" a", b" b"),
        "sent back": lambda: channels()[1].seal(b"a"),
        "without a code": lambda: b"a\n",
        "with a code that is no text": lambda: b"\xff" * 64 + b" a\n",
        "empty": lambda: b"\n",
    }.items(),
    ids=lambda case: case[0],
)
def test_other_messages_do_not(forge: tuple[str, Callable[[], bytes]]) -> None:
    with pytest.raises(ForgedError):
        channels()[1].open(forge[1]())


def test_a_message_arrives_once_and_in_order() -> None:
    host, server = channels()
    first, second = host.seal(b"a"), host.seal(b"a")
    with pytest.raises(ForgedError):
        server.open(second)
    server.open(first)
    with pytest.raises(ForgedError):
        server.open(first)


# ---- what a post may say -------------------------------------------------------------------------

PLACED = {"round": 5, "place": 0, "size": 2}
WRONG: dict[str, dict[str, object]] = {
    "an infinite round": {"round": float("inf")},
    "a round that is no number": {"round": float("nan")},
    "a round beyond all": {"round": 2**60},
    "a negative round": {"round": -1},
    "a round of text": {"round": "5"},
    "a round and a half": {"round": 5.5},
    "a size of 1e30": {**PLACED, "size": 1e30},
    "a place outside of the round": {**PLACED, "place": 2},
    "a place below none": {"place": -2},
    "a place in no round": {"place": 0, "size": 2},
    "a round larger than all sizes": {**PLACED, "size": 3},
    "a name that is no text": {"name": {}},
    "a long name": {"name": "x" * 1001},
    "a name that clears the screen": {"name": "a\x1b[2J"},
    "a name that turns the line around": {"name": "a\u202eb"},
    "a name of two lines": {"name": "a\nb"},
    "a failure that clears the screen": {"failure": "\x1b]0;x\x07"},
    "a section with a control character": {"section": "\x00"},
    "an unknown state": {"state": "boss"},
    "training in no place": {"state": TRAINING},
    "an address with a space": {"address": "127.0.0.1 -o"},
    "a host of any length": {"host": "h" * 300},
    "a port of nowhere": {"port": 65536},
    "a negative port": {"port": -1},
    "true for a number": {"port": True},
    "a number for true": {"waits": 1},
    "a negative step": {"step": -3},
    "no processes": {"processes": 0},
    "no sizes": {"sizes": []},
    "a size of 0": {"sizes": [0]},
    "a size of a million and one": {"sizes": [1_000_001]},
    "an endless last call": {"last_call_s": 1e300},
}


def sent(**fields: object) -> bytes:
    """What a program that need not be a launcher sends; Python also writes NaN."""
    return json.dumps([1, list((POST._asdict() | fields).values())]).encode()


def test_what_launchers_send_is_understood() -> None:
    for fields in (
        {},
        {"state": TRAINING, **PLACED},
        {"failure": "rank 1 failed é", "port": 29400},
    ):
        number, post = Post.decode(sent(**fields))
        assert (number, post) == (1, POST._replace(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_what_no_launcher_sends_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidPostError):
        Post.decode(sent(**fields))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b"[1,[]]", b"\xff", b"[" * 5000])
def test_what_is_no_post_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPostError):
        Post.decode(data)


def test_a_launcher_cleans_what_it_sends() -> None:
    """The text of an error may hold anything."""
    _, post = Post.decode(POST._replace(failure="\x1b[31m" + "x" * 5000 + "\n").encode(1))
    assert len(post.failure) <= 1000
    assert post.failure.isprintable()


def test_a_view_arrives_as_it_was_sent() -> None:
    fault = Fault("b", "gone", True)
    view = Membership("server", lambda: 0.0).post(POST, 3)
    view = view._replace(faults=(fault,), blamed=fault, meets_at=("10.0.0.1", 7))
    assert View.decode(view.encode()) == view


# ---- what a holder of the secret can do ----------------------------------------------------------


@pytest.fixture
def trained() -> Membership:
    """Two hosts that train in round 1."""
    now = [0.0]
    membership = Membership("server", lambda: now[0])
    now[0] += 5
    for _ in range(2):
        views = {host: membership.post(POST._replace(host=host)) for host in "ab"}
    for host, view in views.items():
        membership.post(POST._replace(host=host, state=TRAINING, round=1, place=view.place, size=2))
    return membership


@pytest.mark.parametrize(
    "fields",
    [
        {"round": 2**50, "place": 0, "size": 2, "state": TRAINING, "port": 7},
        {"round": 2**50, "place": 0, "size": 2, "state": DONE},
        {"round": 1, "place": 0, "size": 2, "state": TRAINING, "port": 7},
        {"round": 1, "place": 0, "size": 2, "state": WAITING, "failure": "b is to blame"},
        {"state": DONE},
        {"state": FAILED, "failure": "because"},
    ],
)
def test_a_host_that_was_not_chosen_changes_nothing(
    trained: Membership, fields: dict[str, Any]
) -> None:
    before = trained.post(POST._replace(host="a", state=TRAINING, round=1, place=0, size=2))
    other = trained.post(POST._replace(host="other", **fields))
    assert other.place == -1
    after = trained.post(POST._replace(host="a", state=TRAINING, round=1, place=0, size=2))
    ignored = {"waiting": 0, "waiting_names": (), "post_after_s": 0.0}
    assert after._replace(**ignored) == before._replace(**ignored)  # type: ignore[arg-type]


def test_a_new_server_gives_a_place_to_one_host_only() -> None:
    """It learns places from the hosts; the first one to name a place has it."""
    membership = Membership("server", lambda: 0.0)
    placed = POST._replace(state=TRAINING, round=9, place=0, size=2)
    assert membership.post(placed).place == 0
    assert membership.post(placed._replace(host="other")).place == -1
    assert membership.post(placed._replace(host="third", place=1, size=3, sizes=(3,))).place == -1


# ---- connections ---------------------------------------------------------------------------------


@pytest.fixture
def server(capfd: pytest.CaptureFixture[str]) -> Iterator[RendezvousServer]:
    """A server with a host that waits, which nothing may disturb."""
    serving = RendezvousServer(("127.0.0.1", 0), SECRET, lost_after_s=5)
    serving.serve_in_background()
    client = RendezvousClient(serving.address, SECRET, "run", POST, 5)
    wait_for(lambda: client.contact().view)
    yield serving
    assert list(serving.runs) == ["run"]
    wait_for(lambda: client.contact().unreachable_s < 0.5)
    view = client.contact().view
    assert view is not None
    assert (view.round, view.ended, view.waiting, view.faults) == (0, False, 0, ())
    client.close()
    serving.close()
    said = capfd.readouterr().err
    assert serving.refusals.counts
    for reason in serving.refusals.counts:
        assert any(
            "Refused a connection from 127.0.0.1:" in line and reason in line
            for line in said.splitlines()
        )


class Stranger:
    """A connection by somebody who need not be a launcher."""

    def __init__(self, server: RendezvousServer) -> None:
        self.connection = socket.create_connection(server.address, timeout=PATIENCE_S)
        self._lines = self.connection.makefile("rb")
        self.challenge = bytes.fromhex(self.line().removeprefix(GREETING).decode())

    def meet(self, secret: Secret = SECRET, host: str = "b", run: str = "run") -> Channel:
        hello = msgspec.json.encode([run, host, "00" * 16])
        channel = secret.channel(self.challenge, hello, serves=False)
        self.connection.sendall(channel.seal(hello))
        return channel

    def line(self) -> bytes:
        return self._lines.readline().rstrip(b"\n")

    def is_refused(self) -> bool:
        """Whether the server closes the connection without another word."""
        try:
            return self._lines.read() == b""
        except ConnectionResetError:
            return True


@contextmanager
def stranger(server: RendezvousServer) -> Iterator[Stranger]:
    made = Stranger(server)
    with closing(made.connection):
        yield made


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b'{"run": "run", "number": 1, "post": {}}\n',
        b"0" * 64 + b' ["run","b","00"]\n',
        b"\n",
    ],
)
def test_a_stranger_is_refused(server: RendezvousServer, said: bytes) -> None:
    with stranger(server) as one:
        one.connection.sendall(said)
        assert one.is_refused()
    assert server.refusals.counts == {Reason.NO_SECRET: 1}


def test_a_launcher_with_another_secret_is_refused_and_told(server: RendezvousServer) -> None:
    other = RendezvousClient(server.address, Secret("y" * 64), "run", POST._replace(host="b"), 5)
    problem = wait_for(lambda: other.contact().problem)
    assert VARIABLE in problem
    assert other.contact().view is None
    other._closing = True
    assert Reason.NO_SECRET in server.refusals.counts


def test_a_stranger_that_repeats_what_it_heard_is_refused(server: RendezvousServer) -> None:
    """All bytes of a launcher, as they went over the wire, in a connection of its own."""
    heard: list[bytes] = []
    with tapped(server, heard) as address:
        tapped_client = RendezvousClient(address, SECRET, "run", POST._replace(host="c"), 5)
        wait_for(lambda: tapped_client.contact().view)
        tapped_client.close()
    wait_for(lambda: len(server.newest) == 1)
    with stranger(server) as one:
        one.connection.sendall(b"".join(heard))
        assert one.is_refused()
    assert server.refusals.counts == {Reason.NO_SECRET: 1}


@contextmanager
def tapped(server: RendezvousServer, heard: list[bytes]) -> Iterator[tuple[str, int]]:
    """An address that passes on to the server, and keeps what is sent there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            here, _ = listener.accept()
            there = socket.create_connection(server.address)
            threading.Thread(target=pass_on, args=(there, here, []), daemon=True).start()
            pass_on(here, there, heard)

        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[:2]


def pass_on(source: socket.socket, target: socket.socket, heard: list[bytes]) -> None:
    while data := source.recv(65536):
        heard.append(data)
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def test_a_message_within_a_connection_counts_once(server: RendezvousServer) -> None:
    with stranger(server) as one:
        channel = one.meet()
        one.line()
        post = channel.seal(POST._replace(host="b").encode(1))
        one.connection.sendall(post)
        assert one.line()
        one.connection.sendall(post)
        assert one.is_refused()
    assert server.refusals.counts == {Reason.FORGED: 1}
    wait_for(lambda: len(server.newest) == 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (POST.encode(1), Reason.OTHER_HOST),
        (sent(host="b", round=float("inf")), Reason.BAD_POST),
        (b"x" * 2**21, Reason.TOO_LONG),
    ],
)
def test_a_launcher_that_says_what_cannot_be_is_refused(
    server: RendezvousServer, body: bytes, reason: Reason
) -> None:
    with stranger(server) as one:
        channel = one.meet()
        one.line()
        # The server may close before all of it is sent.
        try:
            one.connection.sendall(channel.seal(body))
        except OSError:
            assert reason is Reason.TOO_LONG
        assert one.is_refused()
    assert server.refusals.counts == {reason: 1}


def test_a_long_greeting_is_refused(server: RendezvousServer) -> None:
    with stranger(server) as one:
        with suppress(OSError):  # the server may close before all of it is sent
            one.connection.sendall(b"x" * 2**22)
        assert one.is_refused()
    assert server.refusals.counts == {Reason.TOO_LONG: 1}


def test_a_silent_stranger_is_refused(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_server, "_HELLO_S", 0.2)
    with stranger(server) as one:
        assert one.is_refused()
    assert server.refusals.counts == {Reason.SILENT: 1}


def test_idle_strangers_hold_no_threads_and_few_connections(server: RendezvousServer) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, limits[1]), limits[1]))
    threads = threading.active_count()
    crowd: list[socket.socket] = []
    try:
        crowd += [socket.create_connection(server.address) for _ in range(3000)]
        wait_for(lambda: sum(server.refusals.counts.values()) >= 3000 - 128)
        assert threading.active_count() <= threads
        assert len(server.strangers) <= 128
        # A launcher is served in the middle of it.
        with stranger(server) as one:
            one.meet()
            assert one.line()
    finally:
        for connection in crowd:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # On a busy machine some have waited too long by then.
    assert set(server.refusals.counts) <= {Reason.CROWD, Reason.SILENT}
    assert server.refusals.counts[Reason.CROWD] > 1000


def test_a_server_without_the_secret_is_not_believed() -> None:
    """It repeats what a real one said, to a launcher that asks now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                _, real = channels()
                connection.sendall(GREETING + b"63" * 16 + b"\n" + real.seal(b"welcome"))

        threading.Thread(target=pretend, daemon=True).start()
        client = RendezvousClient(listener.getsockname()[:2], SECRET, "run", POST, 5)
        assert VARIABLE in wait_for(lambda: client.contact().problem)
        assert client.contact().view is None
        client._closing = True


# ---- reports -------------------------------------------------------------------------------------


def test_refusals_are_counted_and_reported_now_and_then() -> None:
    now = [0.0]
    said: list[str] = []
    refusals = Refusals(said.append, lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        refusals.add(Reason.NO_SECRET, f"10.0.0.7:{second}")
    refusals.add(Reason.CROWD, "10.0.0.8:1")
    assert refusals.counts == {Reason.NO_SECRET: 100, Reason.CROWD: 1}
    assert len(said) == 5
    assert "10.0.0.7:30" in said[1]
    assert "29 more" in said[1]


# ---- how a secret comes --------------------------------------------------------------------------


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(TEXT + "\n")
    return path


def is_same(one: Secret | None, other: Secret) -> bool:
    assert one is not None
    sides = [secret.channel(b"", b"", serves=False) for secret in (one, other)]
    return sides[0].seal(b"a") == sides[1].seal(b"a")


def test_the_environment_holds_it_and_no_child_inherits_it(secret_file: Path) -> None:
    for environment in ({VARIABLE: f" {TEXT}"}, {FILE: str(secret_file)}):
        assert is_same(take_secret(environment), SECRET)
        assert environment == {}
    assert take_secret({}) is None
    assert TEXT not in repr(SECRET) + str(SECRET) + str(vars(SECRET).keys())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)
    with pytest.raises(SpecError, match="chmod 600"):
        take_secret({FILE: str(secret_file)})


@pytest.mark.parametrize("text", ["", "short", "x" * 31, "x" * 5000])
def test_what_is_no_secret_is_refused(secret_file: Path, text: str) -> None:
    secret_file.write_text(text)
    for environment in ({VARIABLE: text}, {FILE: str(secret_file)}):
        with pytest.raises(SpecError) as refused:
            take_secret(environment)
        assert len(text) < 6 or text not in str(refused.value)
        assert environment == {}


def test_what_is_no_file_is_refused(tmp_path: Path, secret_file: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/null")):
        with pytest.raises(SpecError, match=FILE):
            take_secret({FILE: str(path)})
    with pytest.raises(SpecError, match=VARIABLE):
        take_secret({FILE: str(secret_file), VARIABLE: TEXT})


def test_several_hosts_need_a_secret_and_one_makes_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for host in ("10.0.0.1", "node-1", "0.0.0.0", "::"):
        with pytest.raises(SpecError, match=VARIABLE):
            secret_for((host, 29400), None)
    made = secret_for(("127.0.0.1", 29400), None)
    assert is_same(secret_for(("localhost", 1), None), made)
    assert is_same(secret_for(("10.0.0.1", 1), SECRET), SECRET)
    [folder] = tmp_path.iterdir()
    [file] = folder.iterdir()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, file)] == [0o700, 0o600]
    folder.chmod(0o755)
    with pytest.raises(SpecError, match="private folder"):
        secret_for(("127.0.0.1", 29400), None)
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpecError, match="private folder"):
        secret_for(("127.0.0.1", 29400), None)
    assert os.readlink(folder)
