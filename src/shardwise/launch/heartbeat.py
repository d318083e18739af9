"""Heartbeats: the current step and section of each rank, and the time limits of that section.

Each rank writes its heartbeat to a memory-mapped file that the launcher reads. A write takes
microseconds, and the last heartbeat stays readable when the rank itself no longer responds.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shardwise.spec.train import RestartSettings

FOLDER = "SHARDWISE_HEARTBEATS"
# Makes a rank write the stacks of its threads.
DUMP_STACKS = signal.SIGUSR2
# A section is reported, or killed, after this many times its longest known duration.
_WARN_FACTOR, _KILL_FACTOR = 5, 10
# The file by which the launcher asks for a resize.
_RESIZE = "resize"
_LAYOUT = struct.Struct("<qqqqqqdddd32s")


class Heartbeat(NamedTuple):
    """The last state that a rank reported. Times are from the machine's monotonic clock."""

    rank: int
    pid: int
    # The step in progress, counted from 1; 0 before the first one.
    step: int
    # The step that was loaded and the last one that was saved; -1 if none.
    loaded: int
    saved: int
    # The signal that stops the run; 0 if none.
    stopped_by: int
    ready_at: float
    since: float
    warn_at: float
    kill_at: float
    section: str


class _Frame:
    """A section that has not ended yet, and the seconds of its longest part so far."""

    def __init__(self, name: str, slow: bool) -> None:
        self.name, self.slow, self.longest_s = name, slow, 0.0


class _Writer:
    """Writes the heartbeat of this process.

    Sections nest. An inner section interrupts the outer one, and limits apply to each uninterrupted
    part. A section's duration is learned when it ends, from its longest part: the first part alone
    may be empty, and the last one a small rest.
    """

    def __init__(self, folder: Path, rank: int, settings: RestartSettings) -> None:
        path = folder / f"rank-{rank}"
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._settings, self._resize = settings, folder / _RESIZE
        self._learned_s: dict[str, float] = {}
        self._frames = [_Frame("start", slow=True)]
        self.current = Heartbeat(rank, os.getpid(), 0, -1, -1, 0, 0.0, 0.0, 0.0, 0.0, "start")
        # The interpreter's signal handler writes the stacks, even while Python code is blocked.
        self._stacks = (folder / f"stacks-{rank}").open("w")
        faulthandler.register(DUMP_STACKS, self._stacks, all_threads=True)
        self._begin_part()

    def enter(self, section: str, slow: bool) -> int:
        """Begin a section; return its depth for `leave`."""
        self._end_part()
        self._frames.append(_Frame(section, slow))
        self._begin_part()
        return len(self._frames)

    def leave(self, depth: int) -> None:
        """End the section at this depth, and any inner section that raised an exception."""
        self._end_part()
        frame = self._frames[depth - 1]
        del self._frames[depth - 1 :]
        # The first steps compile and initialise: their durations do not apply to later ones.
        if not frame.slow:
            learned = self._learned_s.get(frame.name, 0.0)
            self._learned_s[frame.name] = max(frame.longest_s, learned)
        self._begin_part()

    def _end_part(self) -> None:
        """Record the duration of the part of the innermost section that ends now."""
        frame = self._frames[-1]
        frame.longest_s = max(frame.longest_s, time.monotonic() - self.current.since)

    def _begin_part(self) -> None:
        """Begin a part of the innermost section, and write its time limits."""
        now, frame, settings = time.monotonic(), self._frames[-1], self._settings
        learned = self._learned_s.get(frame.name)
        # A section without a learned duration gets the long limit.
        least = settings.slow_after_s if frame.slow or learned is None else 0.0
        longest = learned or 0.0
        self.current = self.current._replace(
            section=frame.name,
            since=now,
            warn_at=now + max(least, settings.named_after_s, _WARN_FACTOR * longest),
            kill_at=now + max(least, settings.killed_after_s, _KILL_FACTOR * longest),
        )
        self.write()

    def resize_requested(self) -> bool:
        return self._resize.exists()

    def write(self) -> None:
        *numbers, section = self.current
        self._shared[:] = _LAYOUT.pack(*numbers, section.encode()[:32])


_writer: _Writer | None = None


def start_heartbeat(rank: int, settings: RestartSettings) -> None:
    """Start to write heartbeats of this rank, if a launcher reads them."""
    global _writer  # noqa: PLW0603
    folder = os.environ.get(FOLDER)
    if folder is not None:
        _writer = _Writer(Path(folder), rank, settings)


@contextmanager
def section(name: str, slow: bool = False) -> Iterator[None]:
    """Report section `name` while the body runs; `slow` grants the limit of a first step."""
    writer = _writer
    if writer is None:
        yield
        return
    depth = writer.enter(name, slow)
    # After an exception the heartbeat keeps the name of the section that raised it.
    yield
    writer.leave(depth)


def report(**fields: int) -> None:
    """Update the heartbeat: the `step`, the step `loaded` or `saved`, the signal `stopped_by`."""
    if _writer is not None:
        if "loaded" in fields:
            _writer.current = _writer.current._replace(ready_at=time.monotonic())
        _writer.current = Heartbeat(**{**_writer.current._asdict(), **fields})
        _writer.write()


def request_resize(folder: Path) -> None:
    """Ask the ranks to save and end after the same step, so that other hosts can join."""
    (folder / _RESIZE).touch()


def resize_requested() -> bool:
    """Whether the launcher of this rank wants to resize the run."""
    return _writer is not None and _writer.resize_requested()


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the heartbeat of every rank that has started, by rank."""
    heartbeats = []
    for path in folder.glob("rank-*"):
        # A heartbeat may be written at this moment: read until two reads agree.
        for _ in range(3):
            data = path.read_bytes()
            if len(data) == _LAYOUT.size and data == path.read_bytes():
                break
        else:
            continue
        values = _LAYOUT.unpack(data)
        section_name = values[-1].rstrip(b"\0").decode(errors="replace")
        heartbeat = Heartbeat._make([*values[:-1], section_name])
        if heartbeat.pid:
            heartbeats.append(heartbeat)
    return sorted(heartbeats)


def read_stacks(folder: Path, rank: int) -> str:
    """Return the stacks that a rank has written; empty if none."""
    try:
        return (folder / f"stacks-{rank}").read_text(errors="replace")
    except OSError:
        return ""
