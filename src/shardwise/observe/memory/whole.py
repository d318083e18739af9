"""A file of recorded memory, whole: gzip or plain, within bounds."""

from __future__ import annotations

from pathlib import Path

from shardwise.observe.file.stream import pieces
from shardwise.spec.record import SpecError

MOST_BYTES = 4 << 30


def read_whole(path: Path) -> bytes:
    """Its bytes, decompressed; a SpecError where they are broken or too many."""
    problems: list[str] = []
    parts: list[bytes] = []
    size = 0
    for piece in pieces(path, problems):
        size += len(piece)
        if size > MOST_BYTES:
            raise SpecError(f"memory: {path} is larger than {MOST_BYTES >> 30} GiB")
        parts.append(piece)
    if problems:
        raise SpecError(f"memory: {path}: {problems[0]}")
    return b"".join(parts)
