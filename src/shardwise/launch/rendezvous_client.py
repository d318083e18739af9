"""A launcher's connection to the rendezvous server, in its own thread.

The launcher never waits for the network: it leaves its state here and reads the last view of the
other hosts. If the server cannot be reached, training continues and the thread tries again.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import Any, BinaryIO, NamedTuple

import msgspec

from shardwise.launch.membership import TRAINING, Post, View
from shardwise.launch.rendezvous_server import GREETING, LONGEST_LINE, WELCOME, Hello
from shardwise.launch.shared_secret import VARIABLE
from shardwise.pytorch.channel import CHALLENGE_BYTES, Channel, Secret
from shardwise.pytorch.connections import limit_silence

# Seconds between posts while the ranks train, while hosts wait, and after a failure.
_TRAINING_S, _WAITING_S, _RETRY_S = 1.0, 0.2, 1.0


class Contact(NamedTuple):
    """The last view of the other hosts, and the connection to the server.

    `unreachable_s` are the seconds since the server's last answer; `problem` says why.
    """

    view: View | None
    unreachable_s: float
    problem: str


class RendezvousClient:
    """Posts the state of this host and keeps the last view of the others."""

    def __init__(
        self, server: tuple[str, int], secret: Secret, run: str, post: Post, lost_after_s: float
    ) -> None:
        self._server, self._secret, self._run = server, secret, run
        self._lost_after_s = lost_after_s
        self._post, self._count = post, 0
        self._view: View | None = None
        self._answered_at, self._problem = time.monotonic(), ""
        # A signal handler may ask for the view while the same thread does.
        self._lock, self._changed = threading.RLock(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run_thread, daemon=True, name="hosts")
        self._thread.start()

    @property
    def post(self) -> Post:
        """The current state of this host."""
        return self._post

    def update(self, **fields: Any) -> None:
        """Change the state of this host; `contact` then returns no view from before the change."""
        with self._lock:
            if all(getattr(self._post, name) == value for name, value in fields.items()):
                return
            self._post = self._post._replace(**fields)
            self._count += 1
        self._changed.set()

    def report_progress(self, step: int, section: str, waits: bool) -> None:
        """Set the progress in the next post, without sending that post earlier."""
        with self._lock:
            self._post = self._post._replace(step=step, section=section, waits=waits)

    def contact(self) -> Contact:
        """The view that answers the current state of this host, and the state of the connection.

        The view is None if there is no such answer yet, or it is too old.
        """
        with self._lock:
            silent = time.monotonic() - self._answered_at
            fresh = self._view is not None and self._view.answers >= self._count
            view = self._view if fresh and silent < self._lost_after_s else None
            return Contact(view, silent, self._problem)

    def close(self) -> None:
        """Close the connection after the last state was posted, or after two seconds."""
        deadline = time.monotonic() + 2.0
        while self.contact().view is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._closing = True
        self._changed.set()
        self._thread.join(1.0)

    def _run_thread(self) -> None:
        """Connect to the server, and again after each failure, until closed."""
        while not self._closing:
            try:
                with socket.create_connection(self._server, timeout=self._lost_after_s) as server:
                    limit_silence(server, self._lost_after_s)
                    self._exchange(server)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self._problem = str(error) or type(error).__name__
            if not self._closing:
                self._changed.wait(_RETRY_S)
                self._changed.clear()

    def _exchange(self, server: socket.socket) -> None:
        """Post the state and read the answer, repeatedly, until closed."""
        with server.makefile("rb") as answers:
            channel = self._authenticate(server, answers)
            while not self._closing:
                with self._lock:
                    post, number = self._post, self._count
                server.sendall(channel.seal(post.encode(number)))
                view = View.decode(channel.open(_read_line(answers)))
                with self._lock:
                    self._view, self._answered_at, self._problem = view, time.monotonic(), ""
                every_s = _TRAINING_S if post.state == TRAINING else _WAITING_S
                self._changed.wait(max(every_s, view.post_after_s))
                self._changed.clear()

    def _authenticate(self, server: socket.socket, answers: BinaryIO) -> Channel:
        """Prove to the server that this host knows the secret, and check the server's proof.

        Returns the channel for all further messages.
        """
        greeting = _read_line(answers)
        if not greeting.startswith(GREETING):
            raise ConnectionError("no rendezvous server of this version of Shardwise listens there")
        challenge = bytes.fromhex(greeting.removeprefix(GREETING).decode())
        hello = msgspec.json.encode(
            Hello(self._run, self._post.host, secrets.token_hex(CHALLENGE_BYTES))
        )
        channel = self._secret.channel(challenge, hello, serves=False)
        server.sendall(channel.seal(hello))
        try:
            if channel.open(_read_line(answers)) == WELCOME:
                return channel
        except (ConnectionError, ValueError):
            pass
        raise ConnectionError(
            f"it has not proved that it knows the secret of this host; {VARIABLE} must be the same "
            "on all hosts of the run"
        )


def _read_line(answers: BinaryIO) -> bytes:
    """The next line from the server; raises ConnectionError if the connection was closed."""
    line = answers.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return line[:-1]
