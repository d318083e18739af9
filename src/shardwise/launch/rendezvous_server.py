"""The process that all launchers of a run connect to: it decides which hosts train together.

One of the launchers serves it, or `shardwise rendezvous` on a host that does not train. The server
sends random bytes, a launcher answers with its run, its host and a proof that it knows the secret,
and the server proves the same. Then each post of the launcher is answered by a view of the other
hosts, both a line of JSON with a seal. A closed connection means that a launcher has ended, a
silent one that a host or its link is down. Nothing is kept: a restarted server learns the current
round from the launchers that connect again.

One thread serves all connections. Before its proof a connection may do little, and not for long.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
import uuid
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from shardwise.launch.membership import InvalidPostError, Membership, Post
from shardwise.launch.refusals import Reason, Refusals
from shardwise.launch.rendezvous_address import bind_address
from shardwise.launch.say import say
from shardwise.pytorch.channel import CHALLENGE_BYTES, Channel, ForgedError, Secret, body_of
from shardwise.pytorch.connections import limit_silence

# The first bytes that a server sends, before random bytes.
GREETING = b"shardwise-rendezvous 1 "
WELCOME = b"welcome"
# Most bytes of a launcher's first message; of later ones, and of answers that are not read yet.
_LONGEST_HELLO, LONGEST_LINE = 2048, 2**20
# Seconds in which a connection must prove that it knows the secret, and most connections without
# a proof.
_HELLO_S, _MOST_STRANGERS = 5.0, 128
_MOST_HOSTS, _BACKLOG = 100_000, 1024


class Hello(NamedTuple):
    """The first message of a launcher: its run, its host, and random bytes in hexadecimal."""

    run: Annotated[str, Meta(min_length=1, max_length=512)]
    host: Annotated[str, Meta(min_length=1, max_length=64)]
    challenge: Annotated[str, Meta(min_length=2 * CHALLENGE_BYTES, max_length=64)]


class RendezvousServer:
    """A server at one address that keeps the memberships of any number of runs."""

    def __init__(self, address: tuple[str, int], secret: Secret, lost_after_s: float) -> None:
        is_six = ":" in address[0]
        listener = socket.create_server(
            address,
            family=socket.AF_INET6 if is_six else socket.AF_INET,
            dualstack_ipv6=is_six and socket.has_dualstack_ipv6(),
        )
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.secret, self.lost_after_s = secret, lost_after_s
        self.refusals = Refusals(say)
        self.runs: dict[str, Membership] = {}
        self._name = uuid.uuid4().hex
        # A server that is restarted knows no rounds, and must not give the same number twice.
        self._first_round = int(time.time())
        # The connection over which each host of a run posted last.
        self.newest: dict[tuple[str, str], _Connection] = {}
        # Connections without a proof, the oldest first.
        self.strangers: dict[_Connection, None] = {}
        self._loop = asyncio.new_event_loop()
        # A connection that cannot be accepted is tried again; launchers connect again.
        self._loop.set_exception_handler(lambda *_: None)
        self._serving = self._loop.run_until_complete(
            self._loop.create_server(lambda: _Connection(self), sock=listener, backlog=_BACKLOG)
        )
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="rendezvous"
        )

    def serve_in_background(self) -> None:
        self._thread.start()

    def close_after_clients(self, patience_s: float) -> None:
        """Stop serving once all launchers have left, or after `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while self.newest and time.monotonic() < deadline:
            time.sleep(0.05)
        self.close()

    def close(self) -> None:
        """Stop serving, and close all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._serving.close()
        for connection in (*self.newest.values(), *self.strangers):
            connection.abort()
        # Sockets are closed in the next turn of the loop.
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        self._loop.close()

    # ---- called by connections ------------------------------------------------------------------

    def membership(self, run: str) -> Membership:
        """The membership of a run, created at its first use."""
        if run not in self.runs:
            self.runs[run] = Membership(self._name, time.monotonic, self._first_round)
        return self.runs[run]

    def admit(self, stranger: _Connection) -> None:
        """Accept a connection without a proof yet; if there are too many, refuse the oldest."""
        if len(self.strangers) >= _MOST_STRANGERS:
            next(iter(self.strangers)).refuse(Reason.CROWD)
        self.strangers[stranger] = None

    def forget(self, connection: _Connection, hello: Hello, cause: str, sure: bool) -> None:
        """Record that a host has left, unless it has connected again."""
        if self.newest.get(hello[:2]) is not connection:
            return
        del self.newest[hello[:2]]
        membership = self.membership(hello.run)
        membership.lose(hello.host, cause, sure)
        if membership.is_empty:
            del self.runs[hello.run]


class _Connection(asyncio.Protocol):
    """The connection of one launcher, or of a stranger that has not proved to be one."""

    def __init__(self, server: RendezvousServer) -> None:
        self._server, self._received = server, bytearray()
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._hello: Hello | None = None
        self._channel: Channel | None = None
        self._refused: Reason | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        with suppress(OSError):  # already closed by the other side
            limit_silence(transport.get_extra_info("socket"), self._server.lost_after_s)
        self._server.admit(self)
        self._patience = asyncio.get_running_loop().call_later(_HELLO_S, self.refuse, Reason.SILENT)
        transport.write(GREETING + self._challenge.hex().encode() + b"\n")

    def data_received(self, data: bytes) -> None:
        self._received += data
        while not self._transport.is_closing():
            line, found, rest = self._received.partition(b"\n")
            longest = LONGEST_LINE if self._hello is not None else _LONGEST_HELLO
            if max(len(line) - longest, self._transport.get_write_buffer_size() - LONGEST_LINE) > 0:
                self.refuse(Reason.TOO_LONG)
            elif found:
                self._received = rest
                self._read(bytes(line))
            else:
                return

    def _read(self, line: bytes) -> None:
        """Handle one line; refuse the connection if the line is forged or invalid."""
        try:
            if self._hello is None:
                self._authenticate(line)
            else:
                self._answer(self._hello, line)
        except ForgedError:
            self.refuse(Reason.NO_SECRET if self._hello is None else Reason.FORGED)
        except (InvalidPostError, msgspec.MsgspecError, UnicodeDecodeError):
            self.refuse(Reason.STRANGER if self._hello is None else Reason.BAD_POST)

    def _authenticate(self, line: bytes) -> None:
        """Check the proof of a launcher's first message; answer with the server's own proof."""
        server = self._server
        channel = server.secret.channel(self._challenge, body_of(line), serves=True)
        hello = msgspec.json.decode(channel.open(line), type=Hello)
        if len(server.newest) >= _MOST_HOSTS:
            self.refuse(Reason.TOO_MANY_HOSTS)
            return
        self._hello, self._channel = hello, channel
        self._patience.cancel()
        server.strangers.pop(self, None)
        self._transport.write(channel.seal(WELCOME))

    def _answer(self, hello: Hello, line: bytes) -> None:
        """Answer a post with a view; refuse a post for another host than the connection's."""
        assert self._channel is not None, "the launcher has proved what it knows"
        number, post = Post.decode(self._channel.open(line))
        if post.host != hello.host:
            self.refuse(Reason.OTHER_HOST)
            return
        self._server.newest[hello[:2]] = self
        view = self._server.membership(hello.run).post(post, number)
        self._transport.write(self._channel.seal(view.encode()))

    def refuse(self, reason: Reason) -> None:
        """Close the connection and report why; its host then counts as lost."""
        self._refused = reason
        host, port = (self._transport.get_extra_info("peername") or ("unknown", 0))[:2]
        self._server.refusals.add(reason, f"{host}:{port}")
        self.abort()

    def abort(self) -> None:
        self._server.strangers.pop(self, None)
        self._patience.cancel()
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.strangers.pop(self, None)
        self._patience.cancel()
        if self._hello is None:
            return
        silent = isinstance(exc, OSError) and not isinstance(exc, ConnectionError)
        after = f"no sign of life for {self._server.lost_after_s:.0f} s: host or link is down"
        cause = after if silent else self._refused or "its launcher ended"
        # A launcher whose connection somebody else has spoilt connects again.
        sure = not silent and self._refused is None
        self._server.forget(self, self._hello, cause, sure)


def serve_if_local(
    address: tuple[str, int], secret: Secret, lost_after_s: float
) -> RendezvousServer | None:
    """Start a server if `address` is one of this host and nobody serves there yet.

    Returns the server; None if none was started.
    """
    with suppress(OSError), socket.create_connection(address, timeout=1.0):
        return None
    try:
        server = RendezvousServer(bind_address(address), secret, lost_after_s)
    except OSError:
        return None
    server.serve_in_background()
    return server
