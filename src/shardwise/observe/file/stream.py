"""Bytes of a trace file in pieces, gzip or plain, whole or cut off."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
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
        make, broken = _inflater()
        inflater = make()
        while packed := file.read(PIECE // 8):
            try:
                while packed:
                    if inflater.eof:  # several members in one file
                        inflater = make()
                    piece = inflater.decompress(packed)
                    # Zeros may pad the end of a file.
                    packed = inflater.unused_data.lstrip(b"\0") if inflater.eof else b""
                    if piece:
                        yield piece
            except broken as error:
                problems.append(f"the compressed data is broken ({error}); read up to there")
                return
        if not inflater.eof:
            problems.append("the compressed file is cut off; read up to there")


def _inflater() -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What makes a decompressor, and what that raises."""
    try:
        from isal import isal_zlib
    except ImportError:
        return (lambda: zlib.decompressobj(wbits=31)), (zlib.error,)
    broken: Any = isal_zlib.error
    return (lambda: isal_zlib.decompressobj(wbits=31)), (broken, zlib.error)
