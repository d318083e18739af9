"""A trace as columns: who did what from when to when, in int64 nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.observe.events import AnyEvent, EventReader
from shardwise.observe.stream import pieces
from shardwise.spec.record import SpecError

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]

# Of nanoseconds since 1970 nothing is lost in an int64 until the year 2262.
_NONE = -1


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Trace:
    """One rank's events that last, in the order of the file.

    Texts are dictionary-encoded; numbers that an event does not have are -1.
    """

    path: Path
    name: Codes
    category: Codes
    process: Codes
    thread: Codes
    start_ns: Ints
    end_ns: Ints
    device: Ints
    stream: Ints
    correlation: Ints
    external: Ints
    moved: Ints
    # Rows that carry collective metadata, and what it says.
    collective: Codes
    elements: Ints
    group_size: Ints
    group: Codes
    dtype: Codes
    # Raw JSON of input shapes and types, by row, where they were recorded.
    shapes: dict[int, bytes]
    types: dict[int, bytes]
    texts: list[str]
    thread_names: dict[tuple[str, str], str]
    about: dict[str, Any]
    problems: list[str]

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def rank(self) -> int | None:
        info = self.about.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and rank >= 0 else None

    @property
    def world_size(self) -> int | None:
        info = self.about.get("distributedInfo")
        size = info.get("world_size") if isinstance(info, dict) else None
        return size if isinstance(size, int) and size > 0 else None

    def code(self, text: str) -> int:
        """The code of a text; -2, which no row has, where it does not occur."""
        try:
            return self.texts.index(text)
        except ValueError:
            return -2

    def in_category(self, *names: str) -> npt.NDArray[np.bool_]:
        codes = [self.code(name) for name in names]
        found: npt.NDArray[np.bool_] = np.isin(self.category, codes)
        return found


class _Texts:
    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def of(self, values: Iterable[Any]) -> list[int]:
        codes = self.codes
        return [
            _NONE if value is None else codes.setdefault(str(value), len(codes)) for value in values
        ]


def _number(value: Any) -> int:
    """A whole number that may have been written as a text; -1 for anything else."""
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else _NONE
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return _NONE


class _Columns:
    def __init__(self) -> None:
        self.texts = _Texts()
        self.parts: list[dict[str, Any]] = []
        self.rows = 0
        self.negative = self.timeless = 0
        self.shapes: dict[int, bytes] = {}
        self.types: dict[int, bytes] = {}
        self.thread_names: dict[tuple[str, str], str] = {}

    def add(self, batch: list[AnyEvent]) -> None:
        for event in batch:
            if event.ph == "M" and event.name == "thread_name" and event.args is not None:
                self.thread_names[str(event.pid), str(event.tid)] = str(event.args.name)
        lasting = [event for event in batch if event.ph == "X" and event.dur is not None]
        kept = [event for event in lasting if event.ts >= 0 and event.dur >= 0]  # type: ignore[operator]
        self.negative += len(lasting) - len(kept)
        self.timeless += sum(1 for event in batch if event.ph == "X") - len(lasting)
        if not kept:
            return
        code = self.texts.of
        start, duration = _nanoseconds(kept)
        described = [(i, event.args) for i, event in enumerate(kept) if event.args is not None]
        rows = np.asarray([i for i, _ in described], dtype=np.int64)
        args = [a for _, a in described]
        count = len(kept)

        def column(values: list[Any]) -> Ints:
            filled = np.full(count, _NONE, dtype=np.int64)
            filled[rows] = values
            return filled

        part: dict[str, Any] = {
            "name": code(e.name for e in kept),
            "category": code(e.cat for e in kept),
            "process": code(e.pid for e in kept),
            "thread": code(e.tid for e in kept),
            "start_ns": start,
            "end_ns": start + duration,
            "device": column([_number(a.device) for a in args]),
            "stream": column([_number(a.stream) for a in args]),
            "correlation": column([_number(a.correlation) for a in args]),
            "external": column([_number(a.external) for a in args]),
            "moved": column([_number(a.bytes) for a in args]),
        }
        moving = [(i, a) for i, a in described if a.collective is not None]
        for name in ("collective", "group", "dtype"):
            values = np.full(count, _NONE, dtype=np.int32)
            values[[i for i, _ in moving]] = code(getattr(a, name) for _, a in moving)
            part[name] = values
        for name in ("elements", "group_size"):
            numbers = np.full(count, _NONE, dtype=np.int64)
            numbers[[i for i, _ in moving]] = [
                max(_number(a.sent), _number(a.received))
                if name == "elements"
                else _number(a.group_size)
                for _, a in moving
            ]
            part[name] = numbers
        for i, a in described:
            if bytes(a.shapes):
                self.shapes[self.rows + i] = bytes(a.shapes)
                self.types[self.rows + i] = bytes(a.types)
        self.parts.append(part)
        self.rows += count

    def build(self, path: Path, about: dict[str, Any], problems: list[str]) -> Trace:
        codes = ("name", "category", "process", "thread", "collective", "group", "dtype")
        numbers = ["start_ns", "end_ns", "device", "stream", "correlation", "external", "moved"]
        numbers += ["elements", "group_size"]

        def joined(name: str, dtype: Any) -> Any:
            if not self.parts:
                return np.empty(0, dtype=dtype)
            return np.concatenate([np.asarray(p[name], dtype=dtype) for p in self.parts])

        return Trace(
            path=path,
            **{name: joined(name, np.int32) for name in codes},
            **{name: joined(name, np.int64) for name in numbers},
            shapes=self.shapes,
            types=self.types,
            texts=list(self.texts.codes),
            thread_names=self.thread_names,
            about=about,
            problems=problems,
        )


def _nanoseconds(events: list[AnyEvent]) -> tuple[Ints, Ints]:
    if isinstance(events[0].ts, float):
        start = np.asarray([e.ts for e in events], dtype=np.float64)
        duration = np.asarray([e.dur for e in events], dtype=np.float64)
        return _rounded(start), _rounded(duration)
    return (
        np.asarray([round(e.ts * 1000) for e in events], dtype=np.int64),
        np.asarray([round((e.dur or 0) * 1000) for e in events], dtype=np.int64),
    )


def _rounded(microseconds: npt.NDArray[np.float64]) -> Ints:
    """Whole and fraction apart: a product by 1000 would round the whole."""
    whole = np.floor(np.minimum(microseconds, 9e15))
    fraction = np.rint((microseconds - whole) * 1000)
    return whole.astype(np.int64) * 1000 + np.clip(fraction, 0, 1000).astype(np.int64)


def read_trace(path: Path) -> Trace:
    """Read one rank's trace; what is wrong with it is told in `problems`."""
    problems: list[str] = []
    columns = _Columns()
    try:
        reader = EventReader(pieces(path, problems), problems)
        for batch in reader.batches():
            columns.add(batch)
    except OSError as error:
        raise SpecError(f"trace: cannot read {path}: {error.strerror or error}") from None
    if reader.malformed:
        problems.append(f"{reader.malformed} events cannot be read and are left out")
    if columns.negative:
        problems.append(f"{columns.negative} events last less than nothing and are left out")
    if columns.timeless:
        problems.append(f"{columns.timeless} events have no duration and are left out")
    if not columns.rows:
        told = "; ".join(problems) or "no event in it lasts"
        raise SpecError(f"trace: nothing can be read from {path}: {told}")
    return columns.build(path, reader.about, problems)
