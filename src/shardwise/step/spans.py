"""Timeline: spans of work on lanes (streams, threads), stored as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwise.step.intervals import Intervals, Nanoseconds, union

Kind = Literal["compute", "communication", "copy"]
KINDS: tuple[Kind, ...] = ("compute", "communication", "copy")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Timeline:
    """Spans as columns, in any order. The columns lane, name and unit are indices into the lists.

    `unit` is -1 for a span without an FSDP unit; `bytes` is 0 for a span that moves no data.
    """

    lane: npt.NDArray[np.int32]
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    unit: npt.NDArray[np.int32]
    bytes: npt.NDArray[np.int64]
    lanes: Sequence[str]
    names: Sequence[str]
    units: Sequence[str]
    # Allocated bytes after each change, on the same clock.
    memory_ns: Nanoseconds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    memory_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def window(self) -> tuple[int, int]:
        """Nanoseconds of the first start and the last end; (0, 0) without spans."""
        if not len(self):
            return (0, 0)
        return int(self.start_ns.min()), int(self.end_ns.max())

    def of_kind(self, kind: Kind) -> npt.NDArray[np.bool_]:
        """Mask of the spans of a kind."""
        chosen: npt.NDArray[np.bool_] = self.kind == KINDS.index(kind)
        return chosen

    def cut(self, window: tuple[int, int], begin: int | None = None) -> Timeline:
        """A copy with spans clipped to `window` (ns); its clock starts at the window or `begin`."""
        start, end = window
        zero = start if begin is None else begin
        inside = (self.end_ns > start) & (self.start_ns < end)
        points = (self.memory_ns >= start) & (self.memory_ns < end)
        return replace(
            self,
            lane=self.lane[inside],
            start_ns=np.clip(self.start_ns[inside], start, end) - zero,
            end_ns=np.clip(self.end_ns[inside], start, end) - zero,
            kind=self.kind[inside],
            name=self.name[inside],
            unit=self.unit[inside],
            bytes=self.bytes[inside],
            memory_ns=self.memory_ns[points] - zero,
            memory_bytes=self.memory_bytes[points],
        )

    def covered(self, kind: Kind) -> Intervals:
        """The intervals in which at least one span of this kind runs."""
        chosen = self.of_kind(kind)
        return union(self.start_ns[chosen], self.end_ns[chosen])


class TimelineBuilder:
    """Build a timeline span by span."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []
        self._lanes: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._units: dict[str, int] = {}

    def lane(self, name: str) -> int:
        """Return the number of a lane; lanes keep the order in which they are first named."""
        return self._lanes.setdefault(name, len(self._lanes))

    def add(
        self,
        lane: str,
        start_s: float,
        end_s: float,
        kind: Kind,
        name: str,
        unit: str | None = None,
        moved_bytes: int = 0,
    ) -> None:
        """Add a span; times are in seconds, `moved_bytes` is 0 if it moves no data."""
        self._rows.append(
            (
                self.lane(lane),
                round(start_s * 1e9),
                round(end_s * 1e9),
                KINDS.index(kind),
                self._names.setdefault(name, len(self._names)),
                -1 if unit is None else self._units.setdefault(unit, len(self._units)),
                moved_bytes,
            )
        )

    def build(self) -> Timeline:
        columns = np.asarray(self._rows, dtype=np.int64).reshape(-1, 7)
        return Timeline(
            lane=columns[:, 0].astype(np.int32),
            start_ns=columns[:, 1],
            end_ns=columns[:, 2],
            kind=columns[:, 3].astype(np.int8),
            name=columns[:, 4].astype(np.int32),
            unit=columns[:, 5].astype(np.int32),
            bytes=columns[:, 6],
            lanes=list(self._lanes),
            names=list(self._names),
            units=list(self._units),
        )
