"""Find the rank that hangs, the section it hangs in, and the ranks that wait for it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from shardwise.launch.heartbeat import DUMP_STACKS, Heartbeat, read_heartbeats, read_stacks

# A process stopped by a signal for longer is a hang; a debugger or shell stops only for a moment.
_STOPPED_S = 3.0
# A longer gap between polls means that this process was suspended while the clock went on.
_SUSPENDED_S = 2.0
# Older stacks are read again before they decide whether ranks are killed.
_STACKS_S = 5.0
# Stack frames of a rank that waits in a collective.
_COLLECTIVE = re.compile(r"torch/distributed/")
# Sections in the order of a step: the rank in the earliest one is the one that hangs.
_SECTIONS = ("start", "load", "agree", "eval", "save", "profile", "data", "step", "copy", "log")


class Hang(NamedTuple):
    """Ranks that make no progress."""

    ranks: list[int]
    # Ranks that wait for them.
    waiting: list[int]
    message: str
    stacks: dict[int, str]


class HangDetector:
    """Polls the heartbeats of the ranks on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_poll = time.monotonic()
        # When each suspension of this process ended, and how long it lasted.
        self._suspensions: list[tuple[float, float]] = []
        self._stopped_since: dict[int, float] = {}
        # When stacks were last read, and whether they show that the ranks wait.
        self._described_at, self._waits = 0.0, False
        self.is_hanging = False

    def reset(self) -> None:
        """Forget the processes of the last attempt."""
        for path in self._folder.iterdir():
            path.unlink()
        self._stopped_since, self._suspensions, self.is_hanging = {}, [], False

    def heartbeats(self) -> list[Heartbeat]:
        return read_heartbeats(self._folder)

    def poll(self) -> tuple[Hang | None, list[int]]:
        """Return a hang when it is first detected, else None; and the process ids to kill.

        Only the ranks furthest behind can hang: the others wait for them.
        """
        now = time.monotonic()
        if now - self._last_poll > _SUSPENDED_S:
            # The ranks were most likely suspended together with this process.
            self._suspensions.append((now, now - self._last_poll))
            self._stopped_since = {}
        self._last_poll = now
        heartbeats = self.heartbeats()
        stopped = self._stopped(heartbeats, now)
        behind = _furthest_behind(heartbeats)
        late = any(now - self._suspended_for(one) > one.warn_at for one in behind)
        overdue = any(now - self._suspended_for(one) > one.kill_at for one in behind)
        hang = None
        if (late or stopped) and not self.is_hanging:
            hang = self._describe(heartbeats, stopped, now)
        self.is_hanging = late or bool(stopped)
        return hang, [one.pid for one in heartbeats] if overdue or stopped else []

    def waits(self) -> bool:
        """Whether all ranks that make no progress wait in a collective."""
        if not self.is_hanging:
            return False
        if time.monotonic() - self._described_at > _STACKS_S:
            self._describe(self.heartbeats(), [], time.monotonic())
        return self._waits

    def _suspended_for(self, heartbeat: Heartbeat) -> float:
        """Seconds that this process was suspended since the heartbeat's section began."""
        return sum(length for end, length in self._suspensions if heartbeat.since < end)

    def _stopped(self, heartbeats: Sequence[Heartbeat], now: float) -> list[Heartbeat]:
        """Ranks that have been stopped by a signal for longer than _STOPPED_S."""
        stopped = []
        for one in heartbeats:
            if not _is_stopped(one.pid):
                self._stopped_since.pop(one.pid, None)
            elif now - self._stopped_since.setdefault(one.pid, now) > _STOPPED_S:
                stopped.append(one)
        return stopped

    def _describe(
        self, heartbeats: Sequence[Heartbeat], stopped: Sequence[Heartbeat], now: float
    ) -> Hang:
        """Read the stacks of all ranks; return which ranks hang and which wait for them."""
        self._described_at, stacks = now, self._dump_stacks(heartbeats)
        hanging = list(stopped) or _not_waiting(_furthest_behind(heartbeats), stacks)
        message = "; ".join(
            f"rank {one.rank} "
            + ("is stopped by a signal and " if one in stopped else "")
            + f"has made no progress for {now - one.since:.0f} s "
            + f"(step {one.step}, section {one.section}, pid {one.pid})"
            for one in hanging[:4]
        )
        self._waits = not stopped and all(_is_waiting(stacks.get(one.rank, "")) for one in hanging)
        waiting = [one.rank for one in heartbeats if one not in hanging]
        if waiting:
            message += f"; waiting for it: {_list_ranks(waiting)}"
        return Hang([one.rank for one in hanging], waiting, message, stacks)

    def _dump_stacks(self, heartbeats: Sequence[Heartbeat]) -> dict[int, str]:
        """Make the ranks write their stacks; return the stacks by rank, empty if unknown."""
        for one in heartbeats:
            with suppress(ProcessLookupError):
                os.kill(one.pid, DUMP_STACKS)
        time.sleep(0.3)
        return {one.rank: read_stacks(self._folder, one.rank) for one in heartbeats}


def _furthest_behind(heartbeats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Heartbeats of the ranks in the earliest section of the earliest step."""

    def position(one: Heartbeat) -> tuple[int, int]:
        return one.step, _SECTIONS.index(one.section) if one.section in _SECTIONS else len(
            _SECTIONS
        )

    first = min((position(one) for one in heartbeats), default=None)
    return [one for one in heartbeats if position(one) == first]


def _not_waiting(heartbeats: list[Heartbeat], stacks: dict[int, str]) -> list[Heartbeat]:
    """Heartbeats of ranks outside of collectives; all of them if the stacks do not tell."""
    return [one for one in heartbeats if not _is_waiting(stacks.get(one.rank, ""))] or heartbeats


def _is_waiting(stack: str) -> bool:
    """Whether one of the three innermost frames of the main thread is in torch.distributed."""
    main = stack.rpartition("Current thread")[2] or stack
    frames = [line for line in main.splitlines() if line.lstrip().startswith("File")]
    return any(_COLLECTIVE.search(frame) for frame in frames[:3])


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as 'ranks 0, 2'; at most eight are listed."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def kill_processes(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
