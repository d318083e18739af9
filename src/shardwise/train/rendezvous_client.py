"""A launcher's connection to the rendezvous server, in a thread of its own.

The launcher never waits for the network: it leaves its state here and reads the last view of the
other hosts. Where the server cannot be reached, training goes on and the thread tries again.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any, NamedTuple

from shardwise.engine.connections import limit_silence
from shardwise.train.membership import TRAINING, Post, View

# Seconds between posts while the ranks train, while hosts wait, and after a failure.
_TRAINING_S, _WAITING_S, _RETRY_S = 1.0, 0.2, 1.0


class Contact(NamedTuple):
    """The last view of the other hosts, and how long the server has not answered."""

    view: View | None
    unreachable_s: float
    problem: str


class RendezvousClient:
    """Posts the state of this host and keeps the last view of the others."""

    def __init__(self, server: tuple[str, int], run: str, post: Post, lost_after_s: float) -> None:
        self._server, self._run, self._lost_after_s = server, run, lost_after_s
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
        return self._post

    def update(self, **fields: Any) -> None:
        """Change the state of this host; views that do not answer it are no longer shown."""
        with self._lock:
            if all(getattr(self._post, name) == value for name, value in fields.items()):
                return
            self._post = self._post._replace(**fields)
            self._count += 1
        self._changed.set()

    def report_progress(self, step: int, section: str, waits: bool) -> None:
        """Change what the next post says about progress; it is not sent earlier for that."""
        with self._lock:
            self._post = self._post._replace(step=step, section=section, waits=waits)

    def contact(self) -> Contact:
        """The view that answers the current state; None without one, or if it is too old."""
        with self._lock:
            silent = time.monotonic() - self._answered_at
            fresh = self._view is not None and self._view.answers >= self._count
            view = self._view if fresh and silent < self._lost_after_s else None
            return Contact(view, silent, self._problem)

    def close(self) -> None:
        """Close the connection once the last state was posted, or after a short while."""
        deadline = time.monotonic() + 2.0
        while self.contact().view is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._closing = True
        self._changed.set()
        self._thread.join(1.0)

    def _run_thread(self) -> None:
        while not self._closing:
            try:
                with socket.create_connection(self._server, timeout=self._lost_after_s) as server:
                    limit_silence(server, self._lost_after_s)
                    self._exchange(server)
            except (OSError, ValueError, TypeError) as error:
                self._problem = str(error) or type(error).__name__
            self._changed.wait(_RETRY_S)
            self._changed.clear()

    def _exchange(self, server: socket.socket) -> None:
        """Post the state and read the answer, again and again."""
        answers = server.makefile("rb")
        while not self._closing:
            with self._lock:
                post, number = self._post, self._count
            message = {"run": self._run, "number": number, "post": post._asdict()}
            server.sendall(json.dumps(message).encode() + b"\n")
            line = answers.readline()
            if not line:
                raise ConnectionError("the connection was closed")
            view = View.from_json(json.loads(line))
            with self._lock:
                self._view, self._answered_at, self._problem = view, time.monotonic(), ""
            every_s = _TRAINING_S if post.state == TRAINING else _WAITING_S
            self._changed.wait(max(every_s, view.post_after_s))
            self._changed.clear()
