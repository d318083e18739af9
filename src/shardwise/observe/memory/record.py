"""The records every source of memory is brought to. What a source does not tell is None."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shardwise.observe.memory.text import printable


class Curve(NamedTuple):
    """Bytes after every event; the first value is the level before the first of them."""

    allocated: list[int]
    reserved: list[int] | None
    seconds: float | None


class Peak(NamedTuple):
    """The first moment of the highest level; event 0 lies before the recording."""

    event: int
    events: int
    allocated_bytes: int
    reserved_bytes: int | None


class Share(NamedTuple):
    """What one kind of memory holds at the peak, and by what it was recognised."""

    category: str
    bytes: int
    evidence: str


class Holder(NamedTuple):
    """One place in the code and what it holds at the peak, in how many allocations."""

    file: str | None
    line: int | None
    function: str
    category: str
    bytes: int
    allocations: int

    @property
    def place(self) -> str:
        return place_of(self.file, self.line, self.function)


def place_of(file: str | None, line: int | None, function: str) -> str:
    """`file.py:12 function`, as much of it as is known and says something."""
    if file is None:
        return printable(function, 60)
    number = "" if line is None else f":{line}"
    named = "" if function == "<module>" else f" {function}"
    return printable(f"{PurePosixPath(file).name}{number}{named}", 60)


class Leak(NamedTuple):
    """Whether memory grows from step to step; `found` is None where that cannot be told."""

    found: bool | None
    why: str
    steps: int | None = None
    bytes_per_step: int | None = None
    place: str | None = None
    file: str | None = None


class Fragmentation(NamedTuple):
    """What is reserved and not used, at the end of the recording, and what that led to.

    `split_bytes` are free pieces of segments in use, which cannot be given back;
    `cached_bytes` are whole free segments; `rounding_bytes` is what blocks exceed requests by.
    """

    segments: int
    reserved_bytes: int
    allocated_bytes: int
    rounding_bytes: int
    awaiting_bytes: int
    split_bytes: int
    cached_bytes: int
    largest_free_bytes: int
    largest_request_bytes: int
    unused_at_peak_bytes: int | None
    out_of_memory: int
    retries: int
    expandable: bool | None


class Memory(NamedTuple):
    """One device's memory over a recording.

    `loss_bytes` of the peak were allocated inside a loss over a vocabulary, most of them called
    from `loss_place`; `transient_bytes` inside an optimizer step that freed them again. They are
    None where no stack tells.
    """

    path: Path
    source: str
    device: int | None
    curve: Curve
    peak: Peak
    categories: tuple[Share, ...]
    holders: tuple[Holder, ...]
    leak: Leak
    fragmentation: Fragmentation | None
    loss_bytes: int | None
    loss_place: str | None
    transient_bytes: int | None
    problems: tuple[str, ...]


def peak_of(curve: Curve) -> Peak:
    """Where a curve is highest for the first time."""
    event = max(range(len(curve.allocated)), key=curve.allocated.__getitem__)
    reserved = None if curve.reserved is None else curve.reserved[event]
    return Peak(event, len(curve.allocated) - 1, curve.allocated[event], reserved)
