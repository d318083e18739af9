"""Limit the silence of each rank's connections to other hosts, and count the bytes they carry.

A thread of the rank limits the silence of every connection, so that a collective fails soon after a
host or its link went down. It also writes the bytes carried, by which the launcher tells a slow
link from a hang.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from pathlib import Path

from shardwise.launch.heartbeat import FOLDER
from shardwise.pytorch.connections import Connections

_INTERVAL_S = 1.0
# Monitoring alone sends less than this, also while training hangs.
_LEAST_BYTES_PER_S = 4096.0
_WINDOW_S = 5.0
_LAYOUT = struct.Struct("<q")


def watch_connections(rank: int, lost_after_s: float, always: bool = False) -> None:
    """Start the thread that watches connections, if the run has other hosts, or if `always`."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    one_host = here == int(os.environ.get("WORLD_SIZE", "1"))
    if not Path("/proc/self/fd").exists() or (one_host and not always):
        return
    folder = os.environ.get(FOLDER)
    threading.Thread(
        target=_monitor,
        args=(Connections(lost_after_s), _map_counters(Path(folder), rank) if folder else None),
        daemon=True,
        name="connections",
    ).start()


def _map_counters(folder: Path, rank: int) -> mmap.mmap:
    """A memory-mapped file for the bytes that this rank's connections have carried."""
    path = folder / f"traffic-{rank}"
    path.write_bytes(bytes(_LAYOUT.size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _LAYOUT.size)


def _monitor(connections: Connections, shared: mmap.mmap | None) -> None:
    """Check the connections every second, and write the bytes they have carried."""
    while True:
        carried = connections.check()
        if shared is not None:
            shared[:] = _LAYOUT.pack(carried)
        time.sleep(_INTERVAL_S)


class TrafficMeter:
    """The rate at which the ranks of this host exchange bytes, read by the launcher."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples: deque[tuple[float, int]] = deque()

    def is_flowing(self) -> bool:
        """Whether connections carried more in the last seconds than monitoring alone would."""
        return self.bytes_per_s() > _LEAST_BYTES_PER_S

    def bytes_per_s(self) -> float:
        """Bytes per second that all ranks of this host exchanged in the last seconds."""
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def sample(self) -> None:
        """Read the bytes carried until now, at most once a second; keeps a few seconds."""
        now = time.monotonic()
        if self._samples and now - self._samples[-1][0] < _INTERVAL_S:
            return
        carried = sum(
            _LAYOUT.unpack(data)[0]
            for path in self._folder.glob("traffic-*")
            if len(data := path.read_bytes()) == _LAYOUT.size
        )
        self._samples.append((now, carried))
        while now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
