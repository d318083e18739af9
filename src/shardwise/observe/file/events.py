"""Events of a Kineto trace, decoded in batches whatever the layout of the JSON.

A batch ends where one event object ends and the next begins: a brace, a comma, a brace. Inside an
event that sequence is rare, and a batch that does not decode is tried again with an earlier end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

_SEPARATOR = re.compile(rb"\}\s*,\s*\{")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# An absolute time in microseconds with a fraction: more digits than a float has.
_LONG_TIME = re.compile(rb'"ts"\s*:\s*[0-9]{16,}\.[0-9]')
# How many ends are tried before a batch is taken apart event by event.
_TRIES = 20

Text = str | int | float | bool | None


class Args(msgspec.Struct, gc=False):
    """What is read of an event's arguments; the rest is skipped by the decoder.

    Numbers that are not there are -1.
    """

    stream: Text = -1
    device: Text = -1
    correlation: Text = -1
    bytes: Text = -1
    collective: Text = msgspec.field(default=None, name="Collective name")
    sent: Text = msgspec.field(default=None, name="In msg nelems")
    received: Text = msgspec.field(default=None, name="Out msg nelems")
    dtype: Text = None
    group: Text = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Text = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Text = msgspec.field(default=None, name="Group size")
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    allocated: Text = msgspec.field(default=-1, name="Total Allocated")
    memory_of: Text = msgspec.field(default=-1, name="Device Type")


class Event(msgspec.Struct, gc=False):
    """One event; times in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = -1.0
    dur: float | None = -1.0
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """The same with times that a float cannot hold."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Decimal = Decimal(-1)
    dur: Decimal | None = Decimal(-1)
    args: Args | None = None


AnyEvent = Event | ExactEvent


class EventReader:
    """Turns pieces of a file into batches of events; what surrounds them is left in `about`."""

    def __init__(self, pieces: Iterator[bytes], problems: list[str]) -> None:
        self._pieces, self.problems = pieces, problems
        self.about: dict[str, Any] = {}
        self.malformed = 0
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[Event])

    def batches(self) -> Iterator[list[AnyEvent]]:
        head, first = self._find_events()
        if head is None:
            return
        if _LONG_TIME.search(first[: 1 << 20]):
            self._decoder = msgspec.json.Decoder(list[ExactEvent])
        # Always a list that has begun: an opening bracket, and events.
        rest = bytearray(b"[")
        rest += first
        ended = False
        for piece in self._pieces:
            rest += piece
            batch, rest, ended = self._take(rest)
            if batch:
                yield batch
            if ended:
                # What follows the events is small; keep it to be read with the head.
                rest += b"".join(self._pieces)
                break
        tail = bytes(rest)
        if not ended:
            batch, tail = self._last(bytes(rest[1:]))
            if batch:
                yield batch
        self._read_about(head, tail)

    def _find_events(self) -> tuple[bytes | None, bytes]:
        """What stands before the events, and the first bytes of them."""
        text = b""
        for piece in self._pieces:
            text += piece
            found = _EVENTS.search(text)
            if found:
                return text[: found.start()], text[found.end() :]
            if text.lstrip()[:1] == b"[":
                # A bare list of events.
                return b"{", text.lstrip()[1:]
        self.problems.append("it holds no list of trace events")
        return None, b""

    def _take(self, text: bytearray) -> tuple[list[AnyEvent], bytearray, bool]:
        """As many whole events as there are, and the rest."""
        ends = [m.start() + 1 for m in _SEPARATOR.finditer(text, max(0, len(text) - (1 << 16)))]
        if not ends:
            ends = [m.start() + 1 for m in _SEPARATOR.finditer(text)]
        for end in reversed(ends[-_TRIES:]):
            # Closed in place: copying the text would take as long as decoding a third of it.
            kept = text[end]
            text[end] = ord("]")
            decoded = self._decoded(memoryview(text)[: end + 1])
            text[end] = kept
            if decoded is not None:
                following = text[end:].lstrip()
                following[:1] = b"["  # in place of the comma
                return decoded, following, False
        if not ends:
            return [], text, False
        # The end of the list lies before these separators, or an event is broken.
        found, left, ended = self._take_until_broken(bytes(text[1:]))
        return found, bytearray(left if ended else b"[" + left), ended

    def _decode(self, text: bytes) -> list[AnyEvent] | None:
        return self._decoded(b"[" + text + b"]")

    def _decoded(self, text: bytes | memoryview) -> list[AnyEvent] | None:
        try:
            decoded: list[AnyEvent] = self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
            return None
        return decoded

    def _take_until_broken(self, text: bytes) -> tuple[list[AnyEvent], bytes, bool]:
        """Event by event: skips those that cannot be read, stops where the list ends."""
        found: list[AnyEvent] = []
        begin = segment = 0
        for separator in _SEPARATOR.finditer(text):
            end, following = separator.start() + 1, separator.end() - 1
            for start in dict.fromkeys((begin, segment)):
                one = self._decode(text[start:end])
                if one is not None:
                    # What lies between is an event that cannot be read.
                    self.malformed += start > begin
                    found += one
                    begin = following
                    break
                closing = re.search(rb"\}\s*\]", text[start:end])
                last = self._decode(text[start : start + closing.start() + 1]) if closing else None
                if closing and last is not None:
                    return found + last, text[start + closing.end() :], True
            segment = following
        return found, text[begin:], False

    def _last(self, text: bytes) -> tuple[list[AnyEvent], bytes]:
        """The events before the closing bracket, and what follows it."""
        closings = [m.start() for m in re.finditer(rb"\]", text)]
        for end in reversed(closings[-_TRIES * 4 :]):
            decoded = self._decode(text[:end])
            if decoded is not None:
                return decoded, text[end + 1 :]
        found, rest, ended = self._take_until_broken(text + b",{")
        if not ended:
            if rest.strip(b" \r\n\t,{]}") or not found:
                self.problems.append("the list of events is cut off; read up to there")
            return found, b""
        return found, rest.removesuffix(b",{")

    def _read_about(self, head: bytes, tail: bytes) -> None:
        """Everything but the events: device properties, ranks, base time."""
        for text in (
            head + b'"traceEvents":[]' + tail,
            head.rstrip().rstrip(b",") + b"}",
        ):
            try:
                about = msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(about, dict):
                self.about = about
                return
