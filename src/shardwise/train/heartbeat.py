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


class _Heart:
    """The beats of this process."""

    def __init__(self, folder: Path, rank: int, settings: RestartSettings) -> None:
        path = folder / f"rank-{rank}"
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._settings, self.slow = settings, True
        self._longest: dict[str, float] = {}
        self.beat = Beat(rank, os.getpid(), -1, -1, -1, 0, 0.0, 0.0, 0.0, 0.0, "start")
        # Written by the interpreter itself, whatever it is busy with.
        self._stacks = (folder / f"stacks-{rank}").open("w")
        faulthandler.register(TELL, self._stacks, all_threads=True)

    def enter(self, section: str, slow: bool) -> None:
        now = time.monotonic()
        self.slow = slow
        settings, longest = self._settings, self._longest.get(section, 0.0)
        # Of what was never done but in its first steps, nobody knows how long it takes.
        unknown = slow or section not in self._longest
        least = settings.slow_after_s if unknown else 0.0
        self.beat = self.beat._replace(
            section=section,
            since=now,
            named_at=now + max(least, settings.named_after_s, _NAMED * longest),
            killed_at=now + max(least, settings.killed_after_s, _KILLED * longest),
        )
        self.write()

    def leave(self) -> None:
        """Learn how long a section may take, but from what happens again and again."""
        if not self.slow:
            took, section = time.monotonic() - self.beat.since, self.beat.section
            self._longest[section] = max(took, self._longest.get(section, 0.0))

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
        _heart.enter("start", slow=True)


@contextmanager
def section(name: str, slow: bool = False) -> Iterator[None]:
    """The work of this process is now called `name`. `slow` allows for the first of its kind."""
    heart = _heart
    if heart is None:
        yield
        return
    outer, outer_slow = heart.beat.section, heart.slow
    heart.enter(name, slow)
    # Whoever fails here fails in this section, and says so until the end.
    yield
    heart.leave()
    heart.enter(outer, outer_slow)


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
