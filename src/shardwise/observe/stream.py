"""Bytes of a trace file in pieces, gzip or plain, whole or cut off."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Small enough that the events of a piece stay in the processor's cache.
PIECE = 1 << 19
_GZIP = b"\x1f\x8b"


def pieces(path: Path, problems: list[str]) -> Iterator[bytes]:
    """The decompressed file, about a megabyte at a time.

    What cannot be decompressed ends the file; `problems` then gains a sentence.
    """
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP
        file.seek(0)
        if not compressed:
            while piece := file.read(PIECE):
                yield piece
            return
        decompressor = _decompressor()
        while packed := file.read(PIECE // 8):
            try:
                while packed:
                    if decompressor.eof:  # several members in one file
                        packed = decompressor.unused_data + packed
                        decompressor = _decompressor()
                    piece = decompressor.decompress(packed)
                    packed = decompressor.unused_data if decompressor.eof else b""
                    if piece:
                        yield piece
                    if decompressor.eof and packed.strip(b"\0"):
                        decompressor = _decompressor()
                    elif decompressor.eof:
                        packed = b""
            except (zlib.error, ValueError, OSError) as error:
                problems.append(f"the compressed data is broken ({error}); read up to there")
                return
        if not decompressor.eof:
            problems.append("the compressed file is cut off; read up to there")


def _decompressor() -> Any:
    try:
        from isal import isal_zlib

        return isal_zlib.decompressobj(wbits=31)
    except ImportError:
        return zlib.decompressobj(wbits=31)
