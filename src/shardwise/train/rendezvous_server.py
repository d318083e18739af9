"""The process that all launchers of a run connect to: it decides which hosts train together.

One of the launchers serves it, or `shardwise rendezvous` on a host that does not train. It speaks
JSON lines: a post of a launcher is answered by a view of the others. A closed connection means that
a launcher has ended, a silent one that a host or its link is down. Nothing is kept: a restarted
server learns the current round from the launchers that connect again.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
import uuid
from contextlib import suppress

from shardwise.engine.connections import limit_silence
from shardwise.train.membership import Membership, Post
from shardwise.train.rendezvous_address import bind_address

_LONGEST_LINE = 1 << 20


class RendezvousServer(socketserver.ThreadingTCPServer):
    """Serves the memberships of runs at one address. Use as a context manager."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], lost_after_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Connection)
        self.lost_after_s = lost_after_s
        self.lock = threading.Lock()
        self.runs: dict[str, Membership] = {}
        self.name = uuid.uuid4().hex
        # A server that is restarted knows no rounds, and must not give the same number twice.
        self.first_round = int(time.time())
        # The connection over which each host posted last.
        self.newest: dict[str, _Connection] = {}

    def serve_in_background(self) -> None:
        threading.Thread(target=self.serve_forever, daemon=True, name="rendezvous").start()

    def close_after_clients(self, patience_s: float) -> None:
        """Stop serving once all launchers have left, or after a while."""
        deadline = time.monotonic() + patience_s
        while self.newest and time.monotonic() < deadline:
            time.sleep(0.05)
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about one connection that failed; its launcher connects again."""


class _Connection(socketserver.StreamRequestHandler):
    """The connection of one launcher."""

    server: RendezvousServer

    def setup(self) -> None:
        limit_silence(self.request, self.server.lost_after_s)
        super().setup()

    def handle(self) -> None:
        run, host, cause, sure = "", "", "its launcher ended", True
        try:
            while line := self.rfile.readline(_LONGEST_LINE):
                message = json.loads(line)
                post = Post.from_json(message["post"])
                run, host = str(message["run"]), post.host
                self.wfile.write(self._answer(run, post, int(message["number"])))
        except (ConnectionResetError, BrokenPipeError):
            pass
        except OSError:
            cause = f"no sign of life for {self.server.lost_after_s:.0f} s: host or link is down"
            sure = False
        except (ValueError, TypeError, KeyError):
            return  # not a launcher
        finally:
            self._forget(run, host, cause, sure)

    def _answer(self, run: str, post: Post, number: int) -> bytes:
        server = self.server
        with server.lock:
            server.newest[post.host] = self
            if run not in server.runs:
                server.runs[run] = Membership(server.name, time.monotonic, server.first_round)
            view = server.runs[run].post(post, number)
        return json.dumps(view._asdict()).encode() + b"\n"

    def _forget(self, run: str, host: str, cause: str, sure: bool) -> None:
        server = self.server
        with server.lock:
            if server.newest.get(host) is not self or run not in server.runs:
                return  # the launcher has connected again
            del server.newest[host]
            membership = server.runs[run]
            membership.lose(host, cause, sure)
            if membership.is_empty:
                del server.runs[run]


def serve_if_local(address: tuple[str, int], lost_after_s: float) -> RendezvousServer | None:
    """Start a server if `address` is one of this host and nobody serves there yet."""
    with suppress(OSError), socket.create_connection(address, timeout=1.0):
        return None
    try:
        server = RendezvousServer(bind_address(address), lost_after_s)
    except OSError:
        return None
    server.serve_in_background()
    return server
