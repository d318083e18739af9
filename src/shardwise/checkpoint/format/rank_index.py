"""The index of one rank: the tensors of this rank alone, and the checksums of its file.

The layout says which parts a rank writes and in which order; so the index needs no names, offsets
or sizes of the tensors that all ranks share.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from shardwise.checkpoint.format.checksum import BLOCK
from shardwise.checkpoint.format.layout import Layout, check_tensors
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece, Tensor
from shardwise.checkpoint.format.rank_table import RankRecord
from shardwise.checkpoint.format.shard import file_of, pieces_in_file

# A mark, and the length of the JSON of the own tensors; JSON and checksums of 4 bytes follow.
_HEAD = struct.Struct("<4sI")
_MAGIC = b"SWI2"
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_OwnTensors = list[tuple[str, str, tuple[_Count, ...]]]


def index_of(rank: int) -> str:
    """The file name of a rank's index."""
    return f"rank-{rank:05d}.index"


def write_rank_index(own: Sequence[Tensor], checksums: Iterable[int]) -> bytes:
    """The bytes of a rank's index, for the tensors of this rank alone.

    `checksums` are those of all blocks, in the order of the file.
    """
    text = msgspec.json.encode(own)
    return (
        _HEAD.pack(_MAGIC, len(text)) + text + _little_endian(array.array("I", checksums)).tobytes()
    )


class RankIndex(NamedTuple):
    """The tensors of this rank alone, and all pieces in its file."""

    own: list[Tensor]
    pieces: list[Piece]


def read_rank_index(data: bytes, rank: int, record: RankRecord, layout: Layout) -> RankIndex:
    """Parse the index of a rank; raise UntrustedError unless its pieces fill the file exactly."""
    own, checksums = _parse(data)
    if any(one.name in layout.tensors for one in own):
        raise UntrustedError("has a tensor that the layout has too")
    pieces = pieces_in_file(layout.parts_of(rank, own), file_of(rank), record.head)
    end = record.head + sum(piece.length for piece in pieces)
    if end != record.bytes:
        raise UntrustedError(f"has tensors that end at byte {end:,} of {record.bytes:,}")
    return RankIndex(own, list(_with_checksums(pieces, checksums)))


def _parse(data: bytes) -> tuple[list[Tensor], Sequence[int]]:
    """The tensors of this rank alone, and the checksums of all blocks, in an index."""
    try:
        mark, length = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        if mark != _MAGIC or end > len(data) or (len(data) - end) % 4:
            raise UntrustedError("is not an index of a rank")
        own = [
            Tensor(*one) for one in msgspec.json.decode(data[_HEAD.size : end], type=_OwnTensors)
        ]
    except (struct.error, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UntrustedError(f"is not an index of a rank: {error}"[:200]) from None
    check_tensors(own)
    checksums = array.array("I", data[end:])
    return own, _little_endian(checksums)


def _little_endian(numbers: array.array[int]) -> array.array[int]:
    """Swap bytes on a big-endian machine, in place."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _with_checksums(pieces: Iterable[Piece], checksums: Sequence[int]) -> Iterator[Piece]:
    """Yield pieces with their checksums; raise UntrustedError unless the numbers match."""
    at = 0
    for piece in pieces:
        count = -(-piece.length // BLOCK)
        if at + count > len(checksums):
            raise UntrustedError(f"lacks checksums of {piece.tensor[:100]!r}")
        # _replace would take as long as all else here.
        yield Piece(*piece[:-1], tuple(checksums[at : at + count]))
        at += count
    if at != len(checksums):
        raise UntrustedError(f"has {len(checksums) - at:,} checksums too many")
