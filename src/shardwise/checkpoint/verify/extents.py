"""Check the order of pieces in a file: overlaps, gaps and truncation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.checkpoint.format.pieces import Piece


class Extents(NamedTuple):
    """Pieces in order; `readable` ones do not overlap."""

    readable: list[Piece]
    # Begin before another ends.
    overlapping: list[Piece]
    # Extend beyond the end of the file.
    truncated: list[Piece]
    # Begin and end of bytes that belong to no piece.
    gaps: list[tuple[int, int]]


def arrange(pieces: Iterable[Piece], begin: int, size: int) -> Extents:
    """Arrange pieces in a file of `size` bytes, whose data begins at `begin`."""
    found = Extents([], [], [], [])
    at = begin
    for piece in sorted(pieces, key=lambda one: (one.start, one.length)):
        end = piece.start + piece.length
        if end > size:
            found.truncated.append(piece)
            continue
        if piece.start < at:
            found.overlapping.append(piece)
            continue
        if piece.start > at:
            found.gaps.append((at, piece.start))
        found.readable.append(piece)
        at = end
    if at < size and not found.truncated:
        found.gaps.append((at, size))
    return found


def by_file(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.file, []).append(piece)
    return found


def lost_with(pieces: Iterable[Piece]) -> str:
    """The tensors lost with a missing file, as the end of a sentence."""
    return f"; lost with it: {names}" if (names := _some(pieces)) else ""


def truncated_tensors(pieces: Iterable[Piece]) -> str:
    """The tensors truncated with a file, as the end of a sentence."""
    return f"; truncated: {names}" if (names := _some(pieces)) else ""


def _some(pieces: Iterable[Piece]) -> str:
    names = sorted({piece.tensor for piece in pieces})
    return f"{len(names):,} tensors such as {names[0]}" if len(names) > 1 else "".join(names)
