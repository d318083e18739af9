"""Read a file in chunks, gzip or plain, complete or truncated."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.spec.read_file import open_regular

# Small enough that the events of a chunk stay in the processor's cache.
CHUNK = 1 << 19
# Traces shrink 10 to 30 times. A file that grows beyond both limits was crafted to fill memory.
MAX_RATIO = 100
ALWAYS_BYTES = 32 << 20
_GZIP = b"\x1f\x8b"


def read_chunks(path: Path, problems: list[str]) -> Iterator[bytes]:
    """Yield the decompressed file in chunks of up to 2 MiB.

    Stops where decompression fails, and appends a sentence to `problems`.
    """
    with open_regular(path) as file:
        compressed = file.read(2) == _GZIP
        file.seek(0)
        if not compressed:
            while chunk := file.read(CHUNK):
                yield chunk
            return
        make, broken = _inflater()
        inflater = make()
        read = written = 0
        while packed := file.read(CHUNK // 8):
            read += len(packed)
            try:
                while packed:
                    if inflater.eof:  # several members in one file
                        inflater = make()
                    chunk = inflater.decompress(packed, 4 * CHUNK)
                    # Zeros may pad the end of a file.
                    packed = (
                        inflater.unused_data.lstrip(b"\0")
                        if inflater.eof
                        else inflater.unconsumed_tail
                    )
                    written += len(chunk)
                    if written > max(ALWAYS_BYTES, MAX_RATIO * read):
                        problems.append(
                            f"the gzip data grows to more than {MAX_RATIO} times its size; only "
                            "the part before it was read"
                        )
                        return
                    if chunk:
                        yield chunk
            except broken as error:
                problems.append(
                    f"the gzip data is corrupt ({error}); only the part before it was read"
                )
                return
        if not inflater.eof:
            problems.append("the gzip file is truncated; only the part before the end was read")


def _inflater() -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """A decompressor factory, and the exceptions a decompressor raises."""
    try:
        from isal import isal_zlib
    except ImportError:
        return (lambda: zlib.decompressobj(wbits=31)), (zlib.error,)
    broken: Any = isal_zlib.error
    return (lambda: isal_zlib.decompressobj(wbits=31)), (broken, zlib.error)
