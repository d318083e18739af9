"""A file read front to back through one buffer that stays in the processor's cache."""

from __future__ import annotations

from io import RawIOBase
from typing import BinaryIO, cast

from shardwise.checkpoint.format.checksum import crc32

# Large enough that calls cost nothing, small enough for the cache of a core.
BUFFER = 2**20


class Window:
    """What lies in the buffer is not read again; what is asked for must be in the file.

    Raises EOFError where the file ends before.
    """

    def __init__(self, file: BinaryIO, buffer: bytearray | None = None) -> None:
        # Such files can read into a buffer, though the type of most does not say so.
        self._file = cast(RawIOBase, file)
        self._view = memoryview(buffer if buffer is not None else bytearray(BUFFER))
        self._begin, self._held, self._at = 0, 0, 0

    def crc32(self, start: int, length: int) -> int:
        value, end = 0, start + length
        while start < end:
            held = self._hold(start, end - start)
            value = crc32(held, value)
            start += len(held)
        return value

    def read(self, start: int, length: int) -> bytes:
        """A few bytes anywhere; what the buffer holds stays there."""
        inside = start - self._begin
        if inside >= 0 and inside + length <= self._held:
            return bytes(self._view[inside : inside + length])
        self._file.seek(start)
        parts, left = [], length
        while left:
            part = self._file.read(left)
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        self._at = start + length
        return b"".join(parts)

    def hold(self, start: int, length: int) -> None:
        """Have as many of these bytes in the buffer as it takes."""
        inside = start - self._begin
        if inside < 0 or inside + min(length, len(self._view)) > self._held:
            self._fill(start)

    def _hold(self, start: int, length: int) -> memoryview:
        inside = start - self._begin
        if not 0 <= inside < self._held:
            self._fill(start)
            inside = 0
        return self._view[inside : min(self._held, inside + length)]

    def _fill(self, start: int) -> None:
        if start != self._at:
            self._file.seek(start)
        self._begin, self._held = start, 0
        count = self._file.readinto(self._view)
        if not count:
            raise EOFError
        self._held, self._at = count, start + count
