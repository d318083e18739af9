"""Read a file sequentially through one buffer that fits in the processor's cache."""

from __future__ import annotations

from io import RawIOBase
from typing import BinaryIO, cast

from shardwise.checkpoint.format.checksum import crc32

# Large enough to make calls cheap, small enough for the cache of a core.
BUFFER = 2**20


class Window:
    """A buffered view of a file; raises EOFError if the file ends early."""

    def __init__(self, file: BinaryIO, buffer: bytearray | None = None) -> None:
        # These files support readinto, though BinaryIO does not declare it.
        self._file = cast(RawIOBase, file)
        self._view = memoryview(buffer if buffer is not None else bytearray(BUFFER))
        self._begin, self._held, self._at = 0, 0, 0

    def crc32(self, start: int, length: int) -> int:
        """CRC32 of `length` bytes from position `start`."""
        value, end = 0, start + length
        while start < end:
            held = self._hold(start, end - start)
            value = crc32(held, value)
            start += len(held)
        return value

    def read(self, start: int, length: int) -> bytes:
        """Read a few bytes anywhere, without replacing the buffer."""
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
        """Load as many of these bytes into the buffer as fit."""
        inside = start - self._begin
        if inside < 0 or inside + min(length, len(self._view)) > self._held:
            self._fill(start)

    def _hold(self, start: int, length: int) -> memoryview:
        """The first of these bytes, at least one, as a view of the buffer."""
        inside = start - self._begin
        if not 0 <= inside < self._held:
            self._fill(start)
            inside = 0
        return self._view[inside : min(self._held, inside + length)]

    def _fill(self, start: int) -> None:
        """Fill the buffer with the bytes from position `start`; raise EOFError at the end."""
        if start != self._at:
            self._file.seek(start)
        self._begin, self._held = start, 0
        count = self._file.readinto(self._view)
        if not count:
            raise EOFError
        self._held, self._at = count, start + count
