"""Who of a machine's ranks hangs, in what, and who waits for it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardwise.train.heartbeat import TELL, Beat, read_beats, stacks_of

# A process that is stopped for so long was not stopped by accident of a debugger or a shell.
_STOPPED_S = 3.0
# Nobody was watched for so long: the watcher itself was stopped, and all clocks went on.
_ABSENT_S = 2.0
# What ranks do while they wait for others, as frames of their stacks.
_WAITING = re.compile(r"torch/distributed/")
# What they do in a step, in this order; the one that hangs is the one that is furthest behind.
_ORDER = ("start", "load", "agree", "save", "trace", "data", "step", "settle", "log")


class Hang(NamedTuple):
    """Ranks that do not go on, and what can be said about it."""

    culprits: list[int]
    sentence: str
    stacks: dict[int, str]


class Watch:
    """Looks at the beats of the ranks of this machine again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked = time.monotonic()
        # When the watcher came back from an absence, and how long that was.
        self._absences: list[tuple[float, float]] = []
        self._stopped: dict[int, float] = {}
        self.worried = False

    def begin(self) -> None:
        """The processes are new."""
        for path in self._folder.iterdir():
            path.unlink()
        self._stopped, self._absences, self.worried = {}, [], False

    def beats(self) -> list[Beat]:
        return read_beats(self._folder)

    def look(self) -> tuple[Hang | None, list[int]]:
        """A hang that is seen for the first time, and the processes that are to be killed.

        Only those furthest behind can hang: the others wait for them.
        """
        now = time.monotonic()
        if now - self._looked > _ABSENT_S:
            # Whoever stopped the watcher has stopped the others too.
            self._absences.append((now, now - self._looked))
            self._stopped = {}
        self._looked = now
        beats = self.beats()
        stopped = self._stopped_for_long(beats, now)
        behind = _furthest_behind(beats)
        late = any(now - self._absent_since(beat) > beat.named_at for beat in behind)
        overdue = any(now - self._absent_since(beat) > beat.killed_at for beat in behind)
        hang = None
        if (late or stopped) and not self.worried:
            hang = self._explained(beats, stopped, now)
        self.worried = late or bool(stopped)
        return hang, [beat.pid for beat in beats] if overdue or stopped else []

    def _absent_since(self, beat: Beat) -> float:
        return sum(length for end, length in self._absences if beat.since < end)

    def _stopped_for_long(self, beats: Sequence[Beat], now: float) -> list[Beat]:
        found = []
        for beat in beats:
            if _state(beat.pid) != "T":
                self._stopped.pop(beat.pid, None)
            elif now - self._stopped.setdefault(beat.pid, now) > _STOPPED_S:
                found.append(beat)
        return found

    def _explained(self, beats: Sequence[Beat], stopped: Sequence[Beat], now: float) -> Hang:
        stacks = self._stacks(beats)
        culprits = list(stopped) or _busy(_furthest_behind(beats), stacks)
        named = ", ".join(
            f"rank {beat.rank} (process {beat.pid}) "
            + ("is stopped by a signal" if beat in stopped else "does not go on")
            + f" in step {max(0, beat.step)}, section '{beat.section}', "
            + f"since {now - beat.since:.0f} s"
            for beat in culprits[:4]
        )
        waiting = [beat.rank for beat in beats if beat not in culprits]
        more = f"; waiting for it: rank {_some(waiting)}" if waiting else ""
        return Hang([beat.rank for beat in culprits], named + more, stacks)

    def _stacks(self, beats: Sequence[Beat]) -> dict[int, str]:
        for beat in beats:
            with suppress(ProcessLookupError):
                os.kill(beat.pid, TELL)
        time.sleep(0.3)
        return {beat.rank: stacks_of(self._folder, beat.rank) for beat in beats}


def _furthest_behind(beats: Sequence[Beat]) -> list[Beat]:
    """Those in the earliest section of the earliest step."""

    def place(beat: Beat) -> tuple[int, int]:
        return beat.step, _ORDER.index(beat.section) if beat.section in _ORDER else len(_ORDER)

    first = min((place(beat) for beat in beats), default=None)
    return [beat for beat in beats if place(beat) == first]


def _busy(beats: list[Beat], stacks: dict[int, str]) -> list[Beat]:
    """But for those that wait for others, if that can be seen."""
    return [beat for beat in beats if not _waits(stacks.get(beat.rank, ""))] or beats


def _waits(stack: str) -> bool:
    """Whether the main thread is inside a collective: in one of its innermost frames."""
    main = stack.rpartition("Current thread")[2] or stack
    frames = [line for line in main.splitlines() if line.lstrip().startswith("File")]
    return any(_WAITING.search(frame) for frame in frames[:3])


def _state(pid: int) -> str:
    """As the kernel calls it: R, S, D, T for stopped, Z; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
