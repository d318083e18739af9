"""Decode the events of a Kineto trace in batches, for any layout of the JSON.

A batch ends between two event objects: a brace, a comma, a brace. That sequence is rare inside an
event; a batch that does not decode is tried again with an earlier end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

_SEPARATOR = re.compile(rb"\}\s*,\s*\{")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# An absolute time in microseconds with a fraction has more digits than a float.
_LONG_TIME = re.compile(rb'"ts"\s*:\s*[0-9]{16,}\.[0-9]')
# Number of ends to try before a batch is decoded event by event.
_MAX_TRIES = 20
# Limit of one event, and of the JSON before and after the events.
LONGEST = 8 << 20
# Bytes that may fail to decode, in addition to four times the bytes read: an event that contains
# separators fails until its end is read, and a file full of separators would take forever.
MAX_FAILED = 256 << 20

Text = str | int | float | bool | None


class Args(msgspec.Struct, gc=False):
    """Arguments of an event that are read; the decoder skips all others. Absent numbers are -1."""

    stream: Text = -1
    device: Text = -1
    correlation: Text = -1
    bytes: Text = -1
    collective: Text = msgspec.field(default=None, name="Collective name")
    sent: Text = msgspec.field(default=None, name="In msg nelems")
    received: Text = msgspec.field(default=None, name="Out msg nelems")
    dtype: Text = None
    group: Text = msgspec.field(default=None, name="Process Group Name")
    description: Text = msgspec.field(default=None, name="Process Group Description")
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
    """An event with times that need more digits than a float."""

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
    """Decode chunks of a file into batches of events; the rest of the JSON goes to `about`.

    `problems` gets a sentence for each part that cannot be read; `malformed` counts events.
    """

    def __init__(self, chunks: Iterator[bytes], problems: list[str]) -> None:
        self._chunks, self.problems = chunks, problems
        self.about: dict[str, Any] = {}
        self.malformed = 0
        self._read = self._failed = 0
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[Event])

    def batches(self) -> Iterator[list[AnyEvent]]:
        """Yield the events of the file in batches."""
        head, first = self._find_events()
        if head is None:
            return
        if _LONG_TIME.search(first[: 1 << 20]):
            self._decoder = msgspec.json.Decoder(list[ExactEvent])
        # Always the start of a list: an opening bracket, then events.
        rest = bytearray(b"[")
        rest += first
        ended = False
        for chunk in self._chunks:
            rest += chunk
            self._read += len(chunk)
            batch, rest, ended = self._decode_complete(rest)
            if batch:
                yield batch
            if ended:
                # The JSON after the events is small; it is decoded with the head.
                for after in self._chunks:
                    rest += after
                    if len(rest) > LONGEST:
                        break
                break
            if len(rest) > LONGEST or self._fails_too_often():
                self.problems.append(
                    "an event is too long or malformed; only the part before it was read"
                )
                self._read_about(head, b"")
                return
        tail = bytes(rest)
        if not ended:
            batch, tail = self._decode_end(bytes(rest[1:]))
            if batch:
                yield batch
        self._read_about(head, tail)

    def _find_events(self) -> tuple[bytes | None, bytes]:
        """The JSON before the events, and the first bytes of the events.

        None and no bytes if the file has no list of events.
        """
        text = b""
        for chunk in self._chunks:
            text += chunk
            match = _EVENTS.search(text)
            if match:
                return text[: match.start()], text[match.end() :]
            if text.lstrip()[:1] == b"[":
                # A bare list of events.
                return b"{", text.lstrip()[1:]
            if len(text) > LONGEST:
                break
        self.problems.append("it has no list of trace events")
        return None, b""

    def _decode_complete(self, text: bytearray) -> tuple[list[AnyEvent], bytearray, bool]:
        """Decode all complete events.

        Returns the events, the remaining text, and whether the list has ended.
        """
        ends = [m.start() + 1 for m in _SEPARATOR.finditer(text, max(0, len(text) - (1 << 16)))]
        if not ends:
            ends = [m.start() + 1 for m in _SEPARATOR.finditer(text)]
        for end in reversed(ends[-_MAX_TRIES:]):
            # Close the list in place: copying the text would take a third of the decoding time.
            replaced = text[end]
            text[end] = ord("]")
            decoded = self._decoded(memoryview(text)[: end + 1])
            text[end] = replaced
            if decoded is not None:
                following = text[end:].lstrip()
                following[:1] = b"["  # in place of the comma
                return decoded, following, False
        if not ends:
            return [], text, False
        # The list ends before these separators, or an event is malformed.
        events, left, ended = self._decode_one_by_one(bytes(text[1:]))
        return events, bytearray(left if ended else b"[" + left), ended

    def _decode(self, text: bytes) -> list[AnyEvent] | None:
        """Decode events separated by commas; None if the text is not valid."""
        return self._decoded(b"[" + text + b"]")

    def _decoded(self, text: bytes | memoryview) -> list[AnyEvent] | None:
        """Decode a JSON list of events; None if it is not valid, and count its bytes as failed."""
        try:
            decoded: list[AnyEvent] = self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
            self._failed += len(text)
            return None
        return decoded

    def _fails_too_often(self) -> bool:
        """Whether more bytes failed to decode than may fail."""
        return self._failed > MAX_FAILED + 4 * self._read

    def _decode_one_by_one(self, text: bytes) -> tuple[list[AnyEvent], bytes, bool]:
        """Decode event by event, skipping malformed ones; stop where the list ends.

        Returns the events, the remaining text, and whether the list ended.
        """
        events: list[AnyEvent] = []
        begin = segment = 0
        for separator in _SEPARATOR.finditer(text):
            if self._fails_too_often():
                break
            end, following = separator.start() + 1, separator.end() - 1
            for start in dict.fromkeys((begin, segment)):
                one = self._decode(text[start:end])
                if one is not None:
                    # The text between is a malformed event.
                    self.malformed += start > begin
                    events += one
                    begin = following
                    break
                closing = re.search(rb"\}\s*\]", text[start:end])
                last = self._decode(text[start : start + closing.start() + 1]) if closing else None
                if closing and last is not None:
                    return events + last, text[start + closing.end() :], True
            segment = following
        return events, text[begin:], False

    def _decode_end(self, text: bytes) -> tuple[list[AnyEvent], bytes]:
        """The events before the closing bracket of the list, and the text after the bracket."""
        closings = [m.start() for m in re.finditer(rb"\]", text)]
        for end in reversed(closings[-_MAX_TRIES * 4 :]):
            decoded = self._decode(text[:end])
            if decoded is not None:
                return decoded, text[end + 1 :]
        events, rest, ended = self._decode_one_by_one(text + b",{")
        if not ended:
            if not events:
                self.problems.append("its list of events cannot be read")
            elif rest.strip(b" \r\n\t,{]}"):
                self.problems.append(
                    "the list of events is truncated; only the part before the end was read"
                )
            return events, b""
        return events, rest.removesuffix(b",{")

    def _read_about(self, head: bytes, tail: bytes) -> None:
        """Decode the JSON around the events into `about`: device properties, ranks, base time."""
        if len(head) + len(tail) > LONGEST:
            self.problems.append("the JSON around its events is too long; it was not read")
            return
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
