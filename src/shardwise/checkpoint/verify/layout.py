"""How pieces lie in one file: one behind the other, or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.checkpoint.format.pieces import Piece


class Layout(NamedTuple):
    """Pieces in their order; `right` can be read, and no byte of it is read twice."""

    right: list[Piece]
    # Begin before another ends.
    overlapping: list[Piece]
    # End behind the end of the file.
    cut: list[Piece]
    # Begin and end of bytes of no piece.
    gaps: list[tuple[int, int]]


def lay_out(pieces: Iterable[Piece], begin: int, size: int) -> Layout:
    """In a file of `size` bytes, of which pieces may have those from `begin` on."""
    layout = Layout([], [], [], [])
    at = begin
    for piece in sorted(pieces, key=lambda one: (one.start, one.length)):
        end = piece.start + piece.length
        if end > size:
            layout.cut.append(piece)
            continue
        if piece.start < at:
            layout.overlapping.append(piece)
            continue
        if piece.start > at:
            layout.gaps.append((at, piece.start))
        layout.right.append(piece)
        at = end
    if at < size and not layout.cut:
        layout.gaps.append((at, size))
    return layout


def by_file(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.file, []).append(piece)
    return found


def and_with_it(pieces: Iterable[Piece]) -> str:
    """The end of a sentence about a file that is not there."""
    return f", and with it {names}" if (names := _some(pieces)) else ""


def cut_off(pieces: Iterable[Piece]) -> str:
    """The end of a sentence about a file that ends before these do."""
    return f"; cut off: {names}" if (names := _some(pieces)) else ""


def _some(pieces: Iterable[Piece]) -> str:
    names = sorted({piece.tensor for piece in pieces})
    return f"{len(names):,} tensors such as {names[0]}" if len(names) > 1 else "".join(names)
