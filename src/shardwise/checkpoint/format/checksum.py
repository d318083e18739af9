"""CRC32 checksums of fixed-size blocks, so that a slice can be verified alone."""

from __future__ import annotations

from collections.abc import Iterator

try:
    # Six times as fast as zlib.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["BLOCK", "blocks", "crc32"]

# Bytes per checksum; reading a slice reads at most two blocks more.
BLOCK = 2**24


def blocks(length: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each block of `length` bytes; 0 bytes have one empty block."""
    yield 0, min(BLOCK, length)
    for begin in range(BLOCK, length, BLOCK):
        yield begin, min(begin + BLOCK, length)
