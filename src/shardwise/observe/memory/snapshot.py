"""Read a snapshot of the CUDA allocator: final state and event history."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.observe.memory.allocator import (
    MAX_BYTES,
    Block,
    Device,
    Event,
    Frame,
    Mark,
    Segment,
    Snapshot,
)
from shardwise.observe.memory.unpickle import read_pickle
from shardwise.spec.foreign_text import cut
from shardwise.spec.record import SpecError

# Limit on blocks and events, against crafted files.
MAX_ROWS = 20_000_000
# Characters of a path or of a function's name.
_LONGEST = 2000
ACTIONS = frozenset({"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
                     "segment_map", "segment_unmap", "oom", "snapshot"})  # fmt: skip
# Names that other allocators use.
_ALIASES = {"free": "free_requested"}


def read_snapshot(path: Path) -> Snapshot:
    """Read a file written by `torch.cuda.memory._dump_snapshot`."""
    return snapshot_from(read_pickle(path), path)


def snapshot_from(data: Any, path: Path) -> Snapshot:
    """Convert the data of a snapshot: its dict, or only its list of segments.

    `path` is used in messages; raises SpecError if this is not a snapshot.
    """
    if isinstance(data, list):
        data = {"segments": data}
    if not isinstance(data, dict) or not {"segments", "device_traces"} & data.keys():
        raise SpecError(
            f"memory: {path} is not a memory snapshot (no segments, no device_traces); write one "
            "with torch.cuda.memory._dump_snapshot"
        )
    read = _Reader(path)
    segments = [s for raw in _rows(data.get("segments")) if (s := read.segment(raw)) is not None]
    histories = [
        [event for raw in _rows(history) if (event := read.event(raw)) is not None]
        for history in _rows(data.get("device_traces"))
    ]
    notes = [found for raw in _rows(data.get("external_annotations")) if (found := _mark(raw))]
    numbers = {s.device for s in segments} | {n for n, events in enumerate(histories) if events}
    devices = tuple(
        Device(
            number,
            tuple(s for s in segments if s.device == number),
            tuple(histories[number]) if number < len(histories) else (),
            tuple(mark for device, mark in notes if device in (number, None)),
        )
        for number in sorted(numbers)
    )
    if not devices:
        raise SpecError(
            f"memory: {path} is an empty snapshot; call torch.cuda.memory._record_memory_history "
            "before the steps to record"
        )
    settings = data.get("allocator_settings")
    expandable = settings.get("expandable_segments") if isinstance(settings, dict) else None
    return Snapshot(
        path=path,
        devices=devices,
        stacks=tuple(tuple(read.frames[i] for i in stack) for stack in read.stacks),
        expandable=expandable if isinstance(expandable, bool) else None,
        problems=tuple(read.problems()),
    )


class _Reader:
    """Converts the rows of a snapshot, each distinct stack once, and counts malformed rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.frames: list[Frame] = []
        self.stacks: dict[tuple[int, ...], int] = {}
        # Keyed by id(), which is valid while the data of the file is alive.
        self._stack_of: dict[int, int | None] = {}
        self._stack_of_frames: dict[tuple[int, ...], int | None] = {}
        self._frame_of: dict[int, int] = {}
        self._number_of: dict[Frame, int] = {}
        self._rows = 0
        self._bad_segments = self._bad_blocks = self._bad_events = 0

    def segment(self, raw: Any) -> Segment | None:
        """The segment in a row; None, and counted as malformed, if it is invalid."""
        size = _size(raw.get("total_size")) if isinstance(raw, dict) else None
        device = _size(raw.get("device", 0)) if isinstance(raw, dict) else None
        if size is None or device is None or device > 1024:
            self._bad_segments += 1
            return None
        address = _size(raw.get("address"), 1 << 64) or 0
        blocks = []
        for part in _rows(raw.get("blocks")):
            block = self._block(part, address)
            if block is not None:
                blocks.append(block)
                # Old snapshots have no addresses: blocks follow each other.
                address = block.address + block.size
        if sum(block.size for block in blocks) > size:
            self._bad_segments += 1
            return None
        return Segment(device, size, raw.get("segment_type") == "small", tuple(blocks))

    def _block(self, raw: Any, follows: int) -> Block | None:
        """The block in a row; None, and counted as malformed, if it is invalid.

        `follows` is its address if the row has none.
        """
        self._count()
        size = _size(raw.get("size")) if isinstance(raw, dict) else None
        state = raw.get("state") if isinstance(raw, dict) else None
        if size is None or not isinstance(state, str):
            self._bad_blocks += 1
            return None
        address = _size(raw.get("address"), 1 << 64)
        requested = _size(raw.get("requested_size"))
        frames = raw.get("frames")
        if frames is None:
            # Old snapshots list the history of a block, the newest first.
            past = next(iter(_rows(raw.get("history"))), None)
            frames = past.get("frames") if isinstance(past, dict) else None
        return Block(
            follows if address is None else address,
            size,
            requested if requested is not None and requested <= size else None,
            state,
            self._stack(frames),
        )

    def event(self, raw: Any) -> Event | None:
        """The event in a row; None, and counted as malformed, if it is invalid."""
        self._count()
        action = raw.get("action") if isinstance(raw, dict) else None
        action = _ALIASES.get(action, action) if isinstance(action, str) else None
        size = _size(raw.get("size")) if isinstance(raw, dict) else None
        address = _size(raw.get("addr"), 1 << 64) if isinstance(raw, dict) else None
        placeless = action in ("oom", "snapshot")
        if action not in ACTIONS or (not placeless and (size is None or address is None)):
            self._bad_events += 1
            return None
        assert action is not None
        note = raw.get("user_metadata")
        return Event(
            action,
            None if placeless else address,
            size or 0,
            _size(raw.get("time_us"), 1 << 62),
            self._stack(raw.get("frames")),
            note if isinstance(note, str) else "",
        )

    def problems(self) -> Iterable[str]:
        """Sentences on the malformed rows that were skipped."""
        for number, what in (
            (self._bad_segments, "segments"),
            (self._bad_blocks, "blocks"),
            (self._bad_events, "events"),
        ):
            if number:
                yield f"{number} malformed {what} were skipped"

    def _stack(self, raw: Any) -> int | None:
        """The number of the stack that is a list of frames; None if it has no frames."""
        # Many rows share one list of frames, and many other lists hold the same frames.
        key = id(raw)
        if key not in self._stack_of:
            frames = tuple(map(id, _rows(raw)))
            if frames not in self._stack_of_frames:
                self._stack_of_frames[frames] = self._number(raw)
            self._stack_of[key] = self._stack_of_frames[frames]
        return self._stack_of[key]

    def _number(self, raw: Any) -> int | None:
        """The number of a stack, assigned on first use; None if it has no frames."""
        frames = tuple(self._frame(frame) for frame in _rows(raw) if isinstance(frame, dict))
        return self.stacks.setdefault(frames, len(self.stacks)) if frames else None

    def _frame(self, raw: dict[Any, Any]) -> int:
        """The index of a frame in `frames`, appended on first use."""
        # A snapshot stores each frame once and refers to it thousands of times.
        known = self._frame_of.get(id(raw))
        if known is not None:
            return known
        file, function, line = raw.get("filename"), raw.get("name"), _size(raw.get("line"))
        frame = Frame(
            cut(file, _LONGEST) if isinstance(file, str) else "",
            line or 0,
            cut(function, _LONGEST) if isinstance(function, str) else "",
        )
        number = self._number_of.setdefault(frame, len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        self._frame_of[id(raw)] = number
        return number

    def _count(self) -> None:
        """Count a row; raise SpecError after MAX_ROWS."""
        # Lists that contain each other can unfold to far more rows than the file has.
        self._rows += 1
        if self._rows > MAX_ROWS:
            raise SpecError(
                f"memory: {self._path} has more than {MAX_ROWS:,} blocks and events; lower "
                "max_entries"
            )


def _mark(raw: Any) -> tuple[int | None, Mark] | None:
    """The start of an annotation, and its device; None for any other row.

    The device is None if the row does not name one.
    """
    if not isinstance(raw, dict) or str(raw.get("stage", "START")).upper() != "START":
        return None
    name, time = raw.get("name"), _size(raw.get("time_us"), 1 << 62)
    if not isinstance(name, str) or time is None:
        return None
    return _size(raw.get("device")), Mark(cut(name, 60), time)


def _rows(value: Any) -> Iterable[Any]:
    """The value itself if it is a list or tuple; else nothing."""
    return value if isinstance(value, (list, tuple)) else ()


def _size(value: Any, below: int = MAX_BYTES) -> int | None:
    """The value itself if it is an integer from 0 and less than `below`; else None."""
    return value if type(value) is int and 0 <= value < below else None
