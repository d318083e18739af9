"""Read a memory recording, gzip or plain, up to a size limit."""

from __future__ import annotations

from pathlib import Path

from shardwise.observe.file.stream import read_chunks
from shardwise.spec.record import SpecError

MAX_BYTES = 1 << 30


def read_file(path: Path) -> bytes:
    """The decompressed bytes of a file; SpecError if it is corrupt or too large."""
    too_large = SpecError(
        f"memory: {path} is larger than {MAX_BYTES >> 30} GiB; record fewer events"
    )
    problems: list[str] = []
    parts: list[bytes] = []
    size = 0
    if path.stat().st_size > MAX_BYTES:
        raise too_large
    for chunk in read_chunks(path, problems):
        size += len(chunk)
        if size > MAX_BYTES:
            raise too_large
        parts.append(chunk)
    if problems:
        raise SpecError(f"memory: {path} cannot be read: {problems[0]}; copy or record it again")
    return b"".join(parts)
