"""Limits of silence and counts of bytes on real sockets of this process."""

from __future__ import annotations

import socket
import sys

import pytest

pytest.importorskip("torch")
from shardwise.pytorch.connections import Connections, limit_silence

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses /proc")


def test_every_connection_is_limited_and_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sent = socket.create_connection(listener.getsockname())
        received, _ = listener.accept()
        with sent, received:
            connections = Connections(lost_after_s=7)
            before = connections.check()
            sent.sendall(b"x" * 10_000)
            while len(received.recv(10_000, socket.MSG_PEEK)) < 10_000:
                pass
            # Both ends are of this process: one sent them, the other received them.
            assert connections.check() - before == 20_000
            for end in (sent, received):
                limit = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert limit == 7000
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            # The sockets still work, and are not closed with the copies that were looked at.
            received.sendall(b"y")
            assert sent.recv(1) == b"y"


def test_a_silent_host_is_noticed_before_the_limit_has_passed_twice() -> None:
    with socket.socket() as connection:
        limit_silence(connection, 10)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, o) for o in options)
        assert 10 / 2 <= idle + interval * count <= 15
