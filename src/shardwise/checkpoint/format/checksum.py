"""CRC32, as fast as there is a library for it, of blocks, so that a part can be verified alone."""

from __future__ import annotations

from collections.abc import Iterator

try:
    # Six times as fast as zlib's where it is there.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["BLOCK", "blocks", "crc32"]

# A checksum for each of these many bytes of a tensor: whoever needs a slice reads little more.
BLOCK = 2**24


def blocks(length: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each block of so many bytes; nothing has one, empty block."""
    yield 0, min(BLOCK, length)
    for begin in range(BLOCK, length, BLOCK):
        yield begin, min(begin + BLOCK, length)
