"""A trace as columns: name, category, thread, start and end of every event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.observe.file.events import AnyEvent, Args, EventReader
from shardwise.observe.file.stream import read_chunks
from shardwise.spec.record import SpecError

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

# An int64 holds nanoseconds since 1970 until the year 2262.
_NONE = -1
# Limit of the memory of all columns: almost five million events, or a multiple of the file's size.
MAX_BYTES, MAX_GROWTH = 256 << 20, 8
# Bytes of a row; bytes of the Python objects of a text and of a row's shapes, without characters.
_ROW_BYTES, _TEXT_BYTES, _SHAPES_BYTES = 56, 160, 300
_JOIN_PARTS = 64
# Operations whose FLOPs follow from the shapes of their inputs.
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Trace:
    """Events of one rank that have a duration, in file order; times in nanoseconds.

    Texts are dictionary-encoded; numbers that an event lacks are -1.
    """

    path: Path
    name: Codes
    category: Codes
    process: Codes
    thread: Codes
    start_ns: Ints
    end_ns: Ints
    device: Codes
    stream: Codes
    correlation: Ints
    # Bytes that an operation on the device copies or sets.
    moved: Ints
    # Rows with collective metadata, and a value for each of these rows.
    collective_row: Ints
    collective: Codes
    # Elements that the rank puts into the collective, and that it gets out.
    sent: Ints
    received: Ints
    dtype: Codes
    group: Codes
    group_ranks: Codes
    group_size: Ints
    # If memory was profiled: time, allocated bytes, and device type (0 is the host) per change.
    memory_ns: Ints
    memory_bytes: Ints
    memory_of: Ints
    # Raw JSON of input shapes and types by row, for collectives and matmuls.
    shapes: dict[int, bytes]
    types: dict[int, bytes]
    texts: list[str]
    about: dict[str, Any]
    problems: list[str]

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def rank(self) -> int | None:
        """Rank of the process; None if the trace does not record it."""
        info = self.about.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and rank >= 0 else None

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the run; None if the trace does not record it."""
        info = self.about.get("distributedInfo")
        size = info.get("world_size") if isinstance(info, dict) else None
        return size if isinstance(size, int) and size > 0 else None

    def code(self, text: str) -> int:
        """The code of a text; if the text does not occur, -2, which no row has."""
        try:
            return self.texts.index(text)
        except ValueError:
            return -2

    def in_category(self, *names: str) -> npt.NDArray[np.bool_]:
        """Boolean per row: whether its category is one of `names`."""
        codes = [self.code(name) for name in names]
        found: npt.NDArray[np.bool_] = np.isin(self.category, codes)
        return found


class _Codes(dict[Any, int]):
    """Codes of texts, assigned on first use; a number shares the code of its text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.bytes = 0
        self[None] = _NONE

    def __missing__(self, key: Any) -> int:
        if type(key) is not str:
            code = self[str(key)]
        else:
            code = len(self.texts)
            self.texts.append(key)
            self.bytes += len(key)
        self[key] = code
        self.bytes += _TEXT_BYTES
        return code

    def of(self, values: Iterable[Any]) -> Codes:
        """Array of the codes of values."""
        return np.fromiter(map(self.__getitem__, values), dtype=np.int32)


def _integer(value: Any) -> int:
    """An integer, possibly written as text; -1 for anything else."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return _NONE
    return number if -(2**63) <= number < 2**63 else _NONE


def _integers(values: list[Any]) -> Ints:
    """Array of integers; -1 for a value that is not an integer."""
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):
        found = np.empty(0)
    if found.dtype.kind == "i" and found.shape == (len(values),):
        return found.astype(np.int64)
    return np.asarray([_integer(value) for value in values], dtype=np.int64)


def _scatter(rows: Ints, values: list[Any], count: int) -> Ints:
    """Array of `count` integers: `values` at the indices `rows`, -1 at all others."""
    column = np.full(count, _NONE, dtype=np.int64)
    column[rows] = _integers(values)
    return column


_NAME, _CATEGORY = attrgetter("name"), attrgetter("cat")
_PROCESS, _THREAD, _ARGS = attrgetter("pid"), attrgetter("tid"), attrgetter("args")
_COLLECTIVE, _SHAPES = attrgetter("collective"), attrgetter("shapes")
_NO_ARGS = Args()


# Keeping the shapes of all operations would take more memory than everything else.
_SHAPED = ("c10d::", "_c10d_functional::", "gloo:", "mpi:", "ucc:", *MATMULS)


def _needs_shapes(name: str | None) -> bool:
    """Whether the input shapes of an event are kept: of collectives and matmuls."""
    return name is not None and name.startswith(_SHAPED)


class _Columns:
    """The columns of a trace, which grow by a batch of events at a time."""

    def __init__(self) -> None:
        self.codes = _Codes()
        self.parts: list[dict[str, Any]] = []
        self.joined: list[dict[str, Any]] = []
        self.collectives: list[dict[str, Any]] = []
        self.memory: list[Ints] = []
        self.rows = 0
        self.unusable = 0
        self.shapes: dict[int, bytes] = {}
        self.types: dict[int, bytes] = {}
        self._other_bytes = 0

    @property
    def bytes(self) -> int:
        """Approximate bytes of memory that the columns take."""
        return self.rows * _ROW_BYTES + self.codes.bytes + self._other_bytes

    def add(self, batch: list[AnyEvent]) -> None:
        """Append the events of a batch that have a duration, and its changes of memory."""
        spans = [event for event in batch if event.ph == "X"]
        if len(spans) < len(batch):
            self._add_memory([e for e in batch if e.name == "[memory]" and e.ph == "i"])
        start, duration = _nanoseconds(spans)
        lasting = (start >= 0) & (duration >= 0)
        kept = spans
        if not lasting.all():
            self.unusable += int((~lasting).sum())
            kept = [event for event, good in zip(spans, lasting.tolist(), strict=True) if good]
            start, duration = start[lasting], duration[lasting]
        if not kept:
            return
        code = self.codes.of
        args = [a or _NO_ARGS for a in map(_ARGS, kept)]
        part: dict[str, Any] = {
            "name": code(map(_NAME, kept)),
            "category": code(map(_CATEGORY, kept)),
            "process": code(map(_PROCESS, kept)),
            "thread": code(map(_THREAD, kept)),
            "start_ns": start,
            "end_ns": start + duration,
            "device": _integers([a.device for a in args]).astype(np.int32),
            "correlation": _integers([a.correlation for a in args]),
        }
        # Only device rows have a stream and bytes.
        rows = np.flatnonzero(part["device"] >= 0)
        on_device = [args[row] for row in rows.tolist()]
        part["stream"] = _scatter(rows, [a.stream for a in on_device], len(args)).astype(np.int32)
        part["moved"] = _scatter(rows, [a.bytes for a in on_device], len(args))
        self._add_collectives(args)
        if list(map(_SHAPES, args)).count(_NO_ARGS.shapes) < len(args):
            for row, (event, a) in enumerate(zip(kept, args, strict=True)):
                if a.shapes is not _NO_ARGS.shapes and _needs_shapes(event.name):
                    self.shapes[self.rows + row] = bytes(a.shapes)
                    self.types[self.rows + row] = bytes(a.types)
                    self._other_bytes += _SHAPES_BYTES + len(a.shapes) + len(a.types)
        self.parts.append(part)
        self.rows += len(kept)
        if len(self.parts) == _JOIN_PARTS:
            self._join()

    def _join(self) -> None:
        """Concatenate small arrays early: the system does not get their memory back one by one."""
        if self.parts:
            names = list(self.parts[0])
            self.joined.append(
                {name: np.concatenate([part.pop(name) for part in self.parts]) for name in names}
            )
        self.parts = []

    def _add_memory(self, events: list[AnyEvent]) -> None:
        """Append time, allocated bytes and device type of memory events."""
        if not events:
            return
        when, _ = _nanoseconds(events)
        args = [event.args or _NO_ARGS for event in events]
        held = _integers([a.allocated for a in args])
        points = np.stack([when, held, _integers([a.memory_of for a in args])])
        self.memory.append(points[:, (when >= 0) & (held >= 0)])
        self._other_bytes += self.memory[-1].nbytes

    def _add_collectives(self, args: list[Args]) -> None:
        """Append the metadata of the events that are collectives; `args` has a value per event."""
        names = list(map(_COLLECTIVE, args))
        if names.count(None) == len(names):
            return
        moving = [row for row, name in enumerate(names) if name is not None]
        found = [args[row] for row in moving]
        self._other_bytes += len(found) * _ROW_BYTES
        self.collectives.append(
            {
                "collective_row": np.asarray(moving, dtype=np.int64) + self.rows,
                "collective": self.codes.of(a.collective for a in found),
                "dtype": self.codes.of(a.dtype for a in found),
                "group": self.codes.of(_group_name(a) for a in found),
                "group_ranks": self.codes.of(a.group_ranks for a in found),
                "group_size": _integers([_integer(a.group_size) for a in found]),
                "sent": _integers([_integer(a.sent) for a in found]),
                "received": _integers([_integer(a.received) for a in found]),
            }
        )

    def build(self, path: Path, about: dict[str, Any], problems: list[str]) -> Trace:
        """The trace of all events added; this empties the columns."""
        codes = ["name", "category", "process", "thread", "device", "stream"]
        numbers = ["start_ns", "end_ns", "correlation", "moved"]
        sparse = ["collective", "dtype", "group", "group_ranks"]
        sparse_numbers = ["collective_row", "sent", "received", "group_size"]

        def joined(parts: list[dict[str, Any]], name: str, dtype: Any) -> Any:
            if not parts:
                return np.empty(0, dtype=dtype)
            # Drop each part while joining, so that at most one column exists twice.
            return np.concatenate([p.pop(name) for p in parts]).astype(dtype, copy=False)

        self._join()
        memory = np.concatenate([np.empty((3, 0), dtype=np.int64), *self.memory], axis=1)
        memory = memory[:, np.argsort(memory[0], kind="stable")]
        return Trace(
            path=path,
            memory_ns=memory[0],
            memory_bytes=memory[1],
            memory_of=memory[2],
            **{name: joined(self.joined, name, np.int32) for name in codes},
            **{name: joined(self.joined, name, np.int64) for name in numbers},
            **{name: joined(self.collectives, name, np.int32) for name in sparse},
            **{name: joined(self.collectives, name, np.int64) for name in sparse_numbers},
            shapes=self.shapes,
            types=self.types,
            texts=self.codes.texts,
            about=about,
            problems=problems,
        )


def _group_name(args: Args) -> str | None:
    """Name and description of a process group; None without either.

    The description names the axis of a device mesh.
    """
    known = [str(part) for part in (args.group, args.description) if part is not None]
    return " ".join(known) if known else None


def _nanoseconds(events: list[AnyEvent]) -> tuple[Ints, Ints]:
    """Starts and durations of events in nanoseconds; -1 where a value is not a time."""
    if not events or isinstance(events[0].ts, float):
        columns = ([e.ts for e in events], [e.dur for e in events])
        start, duration = (np.asarray(column, dtype=np.float64) for column in columns)
        return _times_ns(start), _times_ns(duration)
    thousand = Decimal(1000)
    return (
        np.asarray([_time_ns(e.ts * thousand) for e in events], dtype=np.int64),  # type: ignore[operator]
        np.asarray([_time_ns((e.dur if e.dur is not None else -1) * thousand) for e in events]),  # type: ignore[operator]
    )


def _time_ns(value: Any) -> int:
    """A time in whole nanoseconds; -1 if it is not a time."""
    return round(value) if 0 <= value < 2**62 else _NONE


def _times_ns(microseconds: npt.NDArray[np.float64]) -> Ints:
    """Microseconds as whole nanoseconds; -1 where a value is not a time.

    The fraction is converted apart: multiplying by 1000 would round the integer part.
    """
    good = (microseconds >= 0) & (microseconds < 9e15)
    safe = np.where(good, microseconds, 0.0)
    integer = np.floor(safe)
    nanoseconds = integer.astype(np.int64) * 1000 + np.rint((safe - integer) * 1000).astype(
        np.int64
    )
    return np.where(good, nanoseconds, _NONE)


def read_trace(path: Path) -> Trace:
    """Read the trace of one rank; raise SpecError if no event with a duration can be read.

    `Trace.problems` lists the parts that could not be read.
    """
    problems: list[str] = []
    columns = _Columns()
    try:
        limit = max(MAX_BYTES, MAX_GROWTH * path.stat().st_size)
        reader = EventReader(read_chunks(path, problems), problems)
        for batch in reader.batches():
            columns.add(batch)
            if columns.bytes > limit:
                problems.append(
                    f"its events take more than {limit >> 20} MiB; only the first "
                    f"{columns.rows:,} were read; record fewer steps"
                )
                break
    except OSError as error:
        raise SpecError(f"trace: cannot read {path}: {error.strerror or error}") from None
    if reader.malformed:
        problems.append(f"{reader.malformed} malformed events were skipped")
    if columns.unusable:
        problems.append(f"{columns.unusable} events without a valid time were skipped")
    if not columns.rows:
        why = "; ".join(problems) or "no event has a duration"
        raise SpecError(
            f"trace: {path} is not a usable trace ({why}); give a file written by torch.profiler's "
            "export_chrome_trace"
        )
    return columns.build(path, reader.about, problems)
