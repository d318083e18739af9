"""How much of the machine processes outside the lab use; jobs can wait until that is little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lab.network import Host, processes_on

# Share of all cores that others may use while a job is timed.
BUSY = 0.05
PAUSE_S = 3.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Seconds since the start of the machine."""

    wall_s: float
    # Of all processes, and of those of the lab.
    busy_s: float
    own_s: float

    def others(self, earlier: Usage) -> float:
        """Share of all cores that other processes have used since."""
        busy, own = self.busy_s - earlier.busy_s, self.own_s - earlier.own_s
        cores = os.cpu_count() or 1
        return max(0.0, busy - own) / max(1e-9, cores * (self.wall_s - earlier.wall_s))


def usage(made: Sequence[Host]) -> Usage:
    user, nice, system = (int(field) for field in _fields("/proc/stat")[1:4])
    own = sum(_ticks(pid) for pid in (os.getpid(), *processes_on(made)))
    return Usage(time.monotonic(), (user + nice + system) * _TICK_S, own * _TICK_S)


def why_not_judged(others: float) -> str | None:
    """Why a time says nothing about a prediction, given the share that others used meanwhile."""
    if others <= BUSY:
        return None
    return f"not judged: other processes used {others:.0%} of the machine; at most {BUSY:.0%} may"


def wait_until_quiet(now: Callable[[], Usage], until: float) -> None:
    """Return when others use little, or at `until` of the monotonic clock."""
    while time.monotonic() < until:
        before = now()
        time.sleep(PAUSE_S)
        if now().others(before) <= BUSY:
            return


def _ticks(pid: int) -> int:
    """In user mode and in the kernel; 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _fields(file: str) -> list[str]:
    return Path(file).read_text().splitlines()[0].split()
