"""What the CUDA allocator tells of itself: segments and blocks at the end, events until then."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# Beyond any device.
MOST_BYTES = 1 << 50
_ALLOCATED = "active_allocated"


class Frame(NamedTuple):
    """One line of a stack; `line` 0 is one that is not known."""

    file: str
    line: int
    function: str


class Block(NamedTuple):
    """A piece of a segment. `requested` is None where only the rounded size is known."""

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
    """Memory taken from the device in one piece; `small` ones serve only small requests."""

    device: int
    size: int
    small: bool
    blocks: tuple[Block, ...]


class Event(NamedTuple):
    """One action of the allocator; sizes are as requested. `stack` counts in `Snapshot.stacks`."""

    action: str
    address: int | None
    size: int
    time_us: int | None
    stack: int | None
    note: str


class Mark(NamedTuple):
    """The beginning of something the program named."""

    name: str
    time_us: int


class Device(NamedTuple):
    """What is known of one device."""

    number: int
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    marks: tuple[Mark, ...]


class Snapshot(NamedTuple):
    """A whole file; `expandable` is None where the settings are not in it."""

    path: Path
    devices: tuple[Device, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    expandable: bool | None
    problems: tuple[str, ...]
