"""The analysis of memory recordings as one record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.observe.memory.read import read_memory
from shardwise.observe.memory.record import Memory
from shardwise.observe.memory.verdict import HEADROOM, MemoryVerdict, verdict_of
from shardwise.spec.quantity import show_gib
from shardwise.spec.record import SpecError
from shardwise.step.notebook import html_of

# Most points of a curve in JSON.
MAX_POINTS = 512


@dataclass(frozen=True)
class MemoryAnalysis:
    """Memory recordings, one per file and device: the peak, its largest owners, leaks."""

    memories: tuple[Memory, ...]
    # Bytes of device memory, to compute the headroom, and the share that should stay free.
    capacity_bytes: int | None = None
    headroom: float = HEADROOM

    def verdict(self, memory: Memory) -> MemoryVerdict:
        """Main cause of the peak of one of the recordings, and the headroom that is left."""
        return verdict_of(memory, self.capacity_bytes, self.headroom)

    def __repr__(self) -> str:
        lines = [
            f"  {one.path.name}: peak {show_gib(one.peak.allocated_bytes)}, "
            f"main cause {self.verdict(one).cause}"
            for one in self.memories
        ]
        return "\n".join([f"MemoryAnalysis of {len(lines)} recordings", *lines])

    def _repr_html_(self) -> str:
        return html_of(self)

    def to_dict(self, top: int = 10) -> dict[str, Any]:
        """The analysis as `--json` prints it, with the `top` largest holders of each peak."""
        return {
            "schema": 2,
            "kind": "measured",
            "memories": [self._plain(one, top) for one in self.memories],
        }

    def _plain(self, memory: Memory, top: int) -> dict[str, Any]:
        """One recording as `--json` prints it, with its `top` largest holders."""
        fragmentation = memory.fragmentation
        return {
            "path": str(memory.path),
            "source": memory.source,
            "device": memory.device,
            "verdict": self.verdict(memory)._asdict(),
            "capacity_bytes": self.capacity_bytes,
            "peak": memory.peak._asdict(),
            "seconds": memory.curve.seconds,
            "curve": _curve(memory),
            "categories": [share._asdict() for share in memory.categories],
            "holders": [holder._asdict() for holder in memory.holders[:top]],
            "holders_left_out": max(0, len(memory.holders) - top),
            "loss_bytes": memory.loss_bytes,
            "transient_bytes": memory.transient_bytes,
            "leak": memory.leak._asdict(),
            "fragmentation": None if fragmentation is None else fragmentation._asdict(),
            "problems": memory.problems,
        }


def read_memories(files: Iterable[Path]) -> list[Memory]:
    """All recordings in all files; SpecError lists every file that cannot be read."""
    memories: list[Memory] = []
    problems: list[str] = []
    for path in files:
        try:
            memories += read_memory(path)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return memories


def _curve(memory: Memory) -> dict[str, list[int] | None]:
    """The curve of a recording, reduced to at most 512 points.

    Each point is the event with the most allocated bytes of an equal part of all events.
    """
    levels, reserved = memory.curve.allocated, memory.curve.reserved
    count = min(MAX_POINTS, len(levels))
    events = [
        max(
            range(i * len(levels) // count, (i + 1) * len(levels) // count),
            key=levels.__getitem__,
        )
        for i in range(count)
    ]
    return {
        "event": events,
        "allocated_bytes": [levels[event] for event in events],
        "reserved_bytes": None if reserved is None else [reserved[event] for event in events],
    }
