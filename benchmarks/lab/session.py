"""Processes that stay alive and train one job after another, because starting them is slow.

with Session(made, ranks_per_host=1, folder=Path("session")) as session:
    outcome = session.run(Path("run.toml"), Path("session/first"))
"""

from __future__ import annotations

import json
import select
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.lab.launch import Launch, Outcome, prepare, read_outcome
from benchmarks.lab.network import Host

START_S = 180.0


class SessionError(RuntimeError):
    """The processes of a session have ended; the message has their last output."""


class Session:
    """`ranks_per_host` ranks on each host that run jobs until the session is closed.

    A job runs as in new processes and has its own process group. Link rates may be set between
    jobs.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        ranks_per_host: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self._ranks_per_host = hosts, ranks_per_host
        self._folder, self._environment = folder, environment or {}
        self._stack = ExitStack()
        self._broken = False

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            # Socket paths must be short. Unix sockets work across network namespaces.
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardlab-"))
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(f"{place}/jobs")
            server.listen()
            words = ["benchmarks.lab.worker", f"{place}/jobs"]
            launch = Launch(
                self.hosts, words, self._folder / "logs", self._ranks_per_host, self._environment
            )
            self._launch = stack.enter_context(launch)
            self._wait_for(server, START_S)
            connection, _ = server.accept()
            self._connection = stack.enter_context(connection)
            self._lines = stack.enter_context(connection.makefile("r"))
            self._reply(START_S)  # all ranks are ready
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, run_toml: Path, folder: Path, timeout_s: float = 300.0) -> Outcome:
        """Train one job. The outcome of an invalid job has its error, and the session continues.

        With `measure = false`, `step_s` has all steps, including the slow first ones.
        Raises SessionError and ends the session if a rank dies or the job takes too long.
        """
        if self._broken:
            raise SessionError("the session has ended with an earlier job")
        begin = time.monotonic()
        job = {"run": str(prepare(run_toml, folder)), "folder": str(folder.resolve())}
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        reply = self._reply(timeout_s)
        took = time.monotonic() - begin
        return read_outcome(folder, reply["code"], took, reply["error"])

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        self._wait_for(self._connection, timeout_s)
        line = self._lines.readline()
        if not line:
            self._launch.wait(5)
            self._broken = True
            raise SessionError(self._launch.last_words())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _wait_for(self, connection: socket.socket, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not select.select([connection], [], [], 0.2)[0]:
            late = time.monotonic() > end
            if late or self._launch.code() is not None:
                self._broken = True
                why = f"no answer within {timeout_s:.0f} s\n" if late else ""
                raise SessionError(why + self._launch.last_words())
