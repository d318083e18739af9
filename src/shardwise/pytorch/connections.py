"""TCP connections of this process: limit how long they are silent, count what they carry.

A connection to a host that lost power or its link is silent: nothing closes it, and the kernel
repeats what was sent for a quarter of an hour. Torch sets no limit on the connections of its
backends and stores, but they are sockets of this process, which Linux lists.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info.
_TCP_BYTES = struct.Struct("=120xQQ")


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Let a TCP connection fail once the other host has acknowledged nothing for `seconds`."""
    if not sys.platform.startswith("linux"):
        return
    probe_s = max(1, round(seconds / 4))
    # The first limit is for data that is under way, the others are for idle connections.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1e3))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


class Connections:
    """The TCP connections of this process."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        # Sockets that are limited already, by their number in the kernel.
        self._limited: set[str] = set()

    def check(self) -> int:
        """Limit the silence of new connections; return the bytes that all open ones carried."""
        carried, limited = 0, set()
        for number, connection in _connections():
            with suppress(OSError):
                if number not in self._limited:
                    limit_silence(connection, self._lost_after_s)
                limited.add(number)
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                carried += sum(_TCP_BYTES.unpack_from(info))
        self._limited = limited
        return carried


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """Connected TCP sockets of this process, each with its number in the kernel."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                with _borrow_socket(int(name)) as connection:
                    if _is_connected(connection):
                        yield target, connection


@contextmanager
def _borrow_socket(descriptor: int) -> Iterator[socket.socket]:
    """Yield a copy of a socket that has another owner; closing the copy leaves it open."""
    copy = socket.socket(fileno=os.dup(descriptor))
    try:
        yield copy
    finally:
        copy.close()


def _is_connected(connection: socket.socket) -> bool:
    """Whether this is a TCP connection, and not a socket that listens."""
    if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
        return False
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
