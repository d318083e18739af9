"""Check the order of pieces in a file: overlaps, gaps and truncation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.checkpoint.format.pieces import Piece


class Extents(NamedTuple):
    """Pieces of a file in the order of their bytes; `readable` pieces do not overlap."""

    readable: list[Piece]
    # Pieces that begin before another piece ends.
    overlapping: list[Piece]
    # Pieces that extend beyond the end of the file.
    truncated: list[Piece]
    # Begin and end of bytes that belong to no piece.
    gaps: list[tuple[int, int]]


def arrange(pieces: Iterable[Piece], begin: int, size: int) -> Extents:
    """Order pieces of a file of `size` bytes whose data begins at byte `begin`."""
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


def pieces_by_file(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Pieces by the file that holds them."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.file, []).append(piece)
    return found


def lost_tensors_words(pieces: Iterable[Piece]) -> str:
    """End of a sentence that names tensors lost with a missing file; empty without tensors."""
    return f"; lost with it: {names}" if (names := _tensors_words(pieces)) else ""


def truncated_tensors(pieces: Iterable[Piece]) -> str:
    """End of a sentence that names truncated tensors; empty without tensors."""
    return f"; truncated: {names}" if (names := _tensors_words(pieces)) else ""


def _tensors_words(pieces: Iterable[Piece]) -> str:
    """Number of tensors and the name of one; only its name if there is one; empty if none."""
    names = sorted({piece.tensor for piece in pieces})
    return f"{len(names):,} tensors such as {names[0]}" if len(names) > 1 else "".join(names)
