"""What each rank is doing, since when, and until when that is nothing to worry about.

A rank writes a line of memory that is shared with whoever watches; that costs microseconds, and
works when the rank itself can no longer say anything.
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
# Asks a rank for the stacks of its threads.
TELL = signal.SIGUSR2
# How often a section may take the longest it ever took.
_NAMED, _KILLED = 5, 10
_LAYOUT = struct.Struct("<qqqqqqdddd32s")


class Beat(NamedTuple):
    """One rank, as it last said. Times are those of the machine's monotonic clock."""

    rank: int
    pid: int
    step: int
    # The step the process went on from, and the last that it saw saved; -1 for none.
    loaded: int
    saved: int
    # The signal that it stops for; 0 for none.
    stopped_by: int
    ready_at: float
    since: float
    named_at: float
    killed_at: float
    section: str


class _Frame:
    """A section that has been entered and not left, and the longest part of it so far."""

    def __init__(self, name: str, slow: bool) -> None:
        self.name, self.slow, self.longest_s = name, slow, 0.0


class _Heart:
    """The heartbeat of this process.

    Sections nest. An inner section interrupts the outer one, and limits apply to each uninterrupted
    part. A section is learned when it ends, by its longest part: the first part alone may be empty,
    and the last one a small rest.
    """

    def __init__(self, folder: Path, rank: int, settings: RestartSettings) -> None:
        path = folder / f"rank-{rank}"
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._settings = settings
        self._learned_s: dict[str, float] = {}
        self._frames = [_Frame("start", slow=True)]
        self.beat = Beat(rank, os.getpid(), -1, -1, -1, 0, 0.0, 0.0, 0.0, 0.0, "start")
        # Written by the interpreter itself, whatever it is busy with.
        self._stacks = (folder / f"stacks-{rank}").open("w")
        faulthandler.register(TELL, self._stacks, all_threads=True)
        self._begin_part()

    def enter(self, section: str, slow: bool) -> int:
        """Begin a section; returns its depth, to be given to `leave`."""
        self._end_part()
        self._frames.append(_Frame(section, slow))
        self._begin_part()
        return len(self._frames)

    def leave(self, depth: int) -> None:
        """End the section of this depth; sections inside it that failed end with it."""
        self._end_part()
        frame = self._frames[depth - 1]
        del self._frames[depth - 1 :]
        # The first steps compile and initialise: they say nothing about the later ones.
        if not frame.slow:
            learned = self._learned_s.get(frame.name, 0.0)
            self._learned_s[frame.name] = max(frame.longest_s, learned)
        self._begin_part()

    def _end_part(self) -> None:
        frame = self._frames[-1]
        frame.longest_s = max(frame.longest_s, time.monotonic() - self.beat.since)

    def _begin_part(self) -> None:
        now, frame, settings = time.monotonic(), self._frames[-1], self._settings
        learned = self._learned_s.get(frame.name)
        # A section that was never completed outside the first steps may take long.
        least = settings.slow_after_s if frame.slow or learned is None else 0.0
        longest = learned or 0.0
        self.beat = self.beat._replace(
            section=frame.name,
            since=now,
            named_at=now + max(least, settings.named_after_s, _NAMED * longest),
            killed_at=now + max(least, settings.killed_after_s, _KILLED * longest),
        )
        self.write()

    def write(self) -> None:
        *numbers, section = self.beat
        self._shared[:] = _LAYOUT.pack(*numbers, section.encode()[:32])


_heart: _Heart | None = None


def start_heart(rank: int, settings: RestartSettings) -> None:
    """From here on this process says what it does, if anyone has asked for it."""
    global _heart  # noqa: PLW0603
    folder = os.environ.get(FOLDER)
    if folder is not None:
        _heart = _Heart(Path(folder), rank, settings)


@contextmanager
def section(name: str, slow: bool = False) -> Iterator[None]:
    """The work of this process is now called `name`. `slow` allows for the first of its kind."""
    heart = _heart
    if heart is None:
        yield
        return
    depth = heart.enter(name, slow)
    # Whoever fails here fails in this section, and says so until the end.
    yield
    heart.leave(depth)


def beat(**facts: int) -> None:
    """Tell more: the `step`, what was `loaded` or `saved`, what the run is `stopped_by`."""
    if _heart is not None:
        if "loaded" in facts:
            _heart.beat = _heart.beat._replace(ready_at=time.monotonic())
        _heart.beat = Beat(**{**_heart.beat._asdict(), **facts})
        _heart.write()


def read_beats(folder: Path) -> list[Beat]:
    """Of every rank that has started; one that is being written is read again."""
    found = []
    for path in folder.glob("rank-*"):
        for _ in range(3):
            data = path.read_bytes()
            if len(data) == _LAYOUT.size and data == path.read_bytes():
                break
        else:
            continue
        values = _LAYOUT.unpack(data)
        beat = Beat._make([*values[:-1], values[-1].rstrip(b"\0").decode(errors="replace")])
        if beat.pid:
            found.append(beat)
    return sorted(found)


def stacks_of(folder: Path, rank: int) -> str:
    try:
        return (folder / f"stacks-{rank}").read_text(errors="replace")
    except OSError:
        return ""
