"""The worker processes of a server: each does one task at a time and can be killed alone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from shardwise.launch.child import python_command
from shardwise.web.work import BEGUN, LENGTH, Reply, framed

_STOPPING = Reply(503, "The server is stopping.")


class Workers:
    """At most `most` worker processes, started on demand and kept for the next task.

    A process is killed if its task takes longer than `limit_s` seconds or is cancelled.
    """

    def __init__(self, most: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._room = asyncio.Semaphore(most)
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._closed = False

    async def reply(self, task: dict[str, Any]) -> Reply:
        """The reply of a worker to a task; status 503 if it took too long or was killed."""
        async with self._room:
            if self._closed:
                return _STOPPING
            process = await self._next_worker()
            try:
                async with asyncio.timeout(self.limit_s):
                    if not await _begins(process, task):  # it was killed while it waited
                        self._busy.discard(process)
                        process = await self._next_worker(fresh=True)
                        await _begins(process, task)
                    found = await _read_reply(process)
            except TimeoutError:
                self._end(process)
                return Reply(503, f"No answer within {self.limit_s:g} s: ask for less at once.")
            except (OSError, EOFError):  # its pipes are closed: it is dead
                self._busy.discard(process)
                killed = Reply(503, "The process that worked on this was killed. Ask again.")
                return _STOPPING if self._closed else killed
            except BaseException:
                self._end(process)
                raise
            self._busy.discard(process)
            self._idle.append(process)
            return found

    async def close(self) -> None:
        """Kill all processes; pending tasks get a reply with status 503."""
        self._closed = True
        self._busy |= {one for one in self._idle if one.returncode is None}
        ended = tuple(self._busy)
        for process in ended:
            self._end(process)
        await asyncio.gather(*(process.wait() for process in ended))

    def _end(self, process: Process) -> None:
        """Kill a process, at most once: asyncio complains about a process that is gone."""
        if process in self._busy:
            self._busy.discard(process)
            process.kill()

    async def _next_worker(self, fresh: bool = False) -> Process:
        """An idle process that seems alive, or a new one; always a new one if `fresh`."""
        process = None
        while self._idle and process is None and not fresh:
            process = self._idle.pop()
            process = process if process.returncode is None else None
        process = process or await _start()
        self._busy.add(process)
        if self._closed:  # while it started
            self._end(process)
        return process


async def _start() -> Process:
    """Start a worker process."""
    # Modules come from where this process has them, never from the folder that it is started in.
    modules = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(
        *python_command("-m", "shardwise.web.work"),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, **modules},
        # Ctrl-C in a terminal reaches all processes of its session; the server ends its workers.
        start_new_session=True,
    )


async def _begins(process: Process, task: dict[str, Any]) -> bool:
    """Send a task to a process; whether the process confirms that it has begun."""
    assert process.stdin is not None
    try:
        process.stdin.write(framed(json.dumps(task).encode()))
        await process.stdin.drain()
        return await _read(process) == BEGUN
    except (OSError, EOFError):
        return False


async def _read_reply(process: Process) -> Reply:
    """Read one reply of a process."""
    return Reply(*json.loads(await _read(process)))


async def _read(process: Process) -> bytes:
    """Read one message of a process, without its length."""
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(LENGTH), "big")
    return await process.stdout.readexactly(length)
