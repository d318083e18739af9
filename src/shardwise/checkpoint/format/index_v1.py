"""The index of checkpoints in format 1, `tensors.json`: the file of each piece of a tensor.

Format 1 is only read. Its index grows with tensors times ranks, and every rank needs all of it.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from shardwise.checkpoint.format.checksum import BLOCK
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import DTYPES, CheckpointContent, Piece, Tensor

NAME = "tensors.json"

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Counts = tuple[_Count, ...]
# file (by its number), start, offsets, sizes, checksums
_Piece = tuple[_Count, _Count, _Counts, _Counts, _Counts]
# name, dtype, shape, pieces
_Tensor = tuple[str, str, _Counts, list[_Piece]]


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    block: _Count
    files: list[str]
    tensors: list[_Tensor]


def read_index(data: bytes) -> CheckpointContent:
    """Tensors and pieces that an index lists; raises UntrustedError if it is invalid."""
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UntrustedError(f"is not a valid index: {error}"[:200]) from None
    if index.block != BLOCK:
        raise UntrustedError(f"has blocks of {index.block:,} bytes, expected {BLOCK:,}")
    tensors: dict[str, Tensor] = {}
    pieces: list[Piece] = []
    for name, dtype, shape, placed in index.tensors:
        if dtype not in DTYPES or name in tensors:
            raise UntrustedError(f"lists {name[:100]!r} twice or with an unknown dtype")
        tensors[name] = Tensor(name, dtype, shape)
        for number, start, offsets, sizes, checksums in placed:
            if number >= len(index.files):
                raise UntrustedError(f"has a piece of {name[:100]!r} in an unknown file")
            length = math.prod(sizes) * DTYPES[dtype]
            if len(checksums) != max(1, -(-length // BLOCK)):
                raise UntrustedError(f"lacks checksums of {name[:100]!r}")
            file = index.files[number]
            pieces.append(Piece(name, offsets, sizes, file, start, length, checksums))
    return CheckpointContent(tensors, pieces, [])
