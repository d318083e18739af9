"""Records shared by all memory sources; a field is None if the source does not record it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from shardwise.spec.foreign_text import cut

# What marks the steps of a recording.
StepSource = Literal["annotations", "metadata", "optimizer", "recurrence", "measured_step"]
LeakReason = Literal["grows", "no_growth", "too_few_steps", "steps_unknown"]


class Curve(NamedTuple):
    """Bytes after every event; the first value is the level before the first event.

    `seconds` is the duration of the recording.
    """

    allocated: list[int]
    reserved: list[int] | None
    seconds: float | None


class Peak(NamedTuple):
    """The first event with the most allocated bytes; event 0 is before the recording.

    `events` is the number of events in the recording.
    """

    event: int
    events: int
    allocated_bytes: int
    reserved_bytes: int | None


class Share(NamedTuple):
    """Bytes of one kind of memory at the peak."""

    category: str
    bytes: int


class Holder(NamedTuple):
    """One line of code, and the bytes and number of its live allocations at the peak."""

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
    """A line of code as text, `file.py:12 function`, as far as it is known."""
    if file is None:
        return cut(function, 60)
    number = "" if line is None else f":{line}"
    named = "" if function == "<module>" else f" {function}"
    return cut(f"{PurePosixPath(file).name}{number}{named}", 60)


class Leak(NamedTuple):
    """Whether memory grows from step to step; `found` is None if that cannot be decided."""

    found: bool | None
    reason: LeakReason
    # Complete steps that were compared, and what marks them.
    steps: int | None = None
    steps_by: StepSource | None = None
    bytes_per_step: int | None = None
    place: str | None = None
    file: str | None = None


class Fragmentation(NamedTuple):
    """Reserved but unused memory at the end of the recording, and its consequences.

    `split_bytes` are free blocks of segments in use, which cannot be released; `cached_bytes` are
    entirely free segments; `rounding_bytes` is the size of blocks beyond what was requested.
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
    """Memory of one device over a recording.

    Of the peak, `loss_bytes` were allocated by a cross-entropy loss, mostly called from
    `loss_place`, and `transient_bytes` by an optimizer step that freed them again. Both are None
    without stacks.
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
    """The first maximum of the allocated bytes."""
    event = max(range(len(curve.allocated)), key=curve.allocated.__getitem__)
    reserved = None if curve.reserved is None else curve.reserved[event]
    return Peak(event, len(curve.allocated) - 1, curve.allocated[event], reserved)
