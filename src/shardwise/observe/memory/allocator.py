"""Records of a CUDA allocator snapshot: final segments and blocks, and the event history."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# More than any device has.
MAX_BYTES = 1 << 50
_ALLOCATED = "active_allocated"


class Frame(NamedTuple):
    """One line of a stack; `line` is 0 if it is unknown."""

    file: str
    line: int
    function: str


class Block(NamedTuple):
    """Part of a segment, in bytes; `requested` is None if only the rounded size is known.

    `stack` is an index into `Snapshot.stacks`; None if no stack was recorded.
    """

    address: int
    size: int
    requested: int | None
    state: str
    stack: int | None

    @property
    def allocated(self) -> bool:
        return self.state == _ALLOCATED

    @property
    def free(self) -> bool:
        return self.state == "inactive"


class Segment(NamedTuple):
    """Memory reserved from the device at once; `small` segments serve small requests only."""

    device: int
    size: int
    small: bool
    blocks: tuple[Block, ...]


class Event(NamedTuple):
    """One action of the allocator; `size` is in bytes, as requested.

    `stack` is an index into `Snapshot.stacks`, and `note` is user metadata.
    """

    action: str
    address: int | None
    size: int
    time_us: int | None
    stack: int | None
    note: str


class Mark(NamedTuple):
    """Start of a user annotation."""

    name: str
    time_us: int


class Device(NamedTuple):
    """Segments, events and annotations of one device."""

    number: int
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    marks: tuple[Mark, ...]


class Snapshot(NamedTuple):
    """A snapshot file; `expandable` is None if the file does not record allocator settings."""

    path: Path
    devices: tuple[Device, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    expandable: bool | None
    problems: tuple[str, ...]
