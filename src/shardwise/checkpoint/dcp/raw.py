"""Write and read the bytes of tensors with their checksums."""

from __future__ import annotations

from typing import Any, BinaryIO, cast

import torch

from shardwise.checkpoint.format.checksum import BLOCK, blocks, crc32
from shardwise.checkpoint.format.pieces import Piece

# Bytes written at a time: they fit in a core's cache, so that they are hashed while they are there.
_CACHED = 2**20


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in order, as a view of its memory if it is contiguous on the CPU.

    Else they are a copy.
    """
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy()))


def write_hashed(file: BinaryIO, data: memoryview) -> tuple[int, ...]:
    """Write bytes; return the CRC32 of every block of 16 MiB."""
    checksums = []
    for begin, end in blocks(len(data)):
        value = 0
        for at in range(begin, end, _CACHED):
            part = data[at : min(at + _CACHED, end)]
            value = crc32(part, value)
            file.write(part)
        checksums.append(value)
    return tuple(checksums)


def read_block(file: BinaryIO, piece: Piece, number: int, into: memoryview | None = None) -> bool:
    """Read block `number` of a piece; return whether it is complete and matches its checksum.

    The bytes go to `into`; None only compares them.
    """
    assert piece.crc32 is not None
    begin = number * BLOCK
    end = min(begin + BLOCK, piece.length)
    view = memoryview(bytearray(min(_CACHED, end - begin))) if into is None else into
    file.seek(piece.start + begin)
    value, at = 0, 0
    while at < end - begin:
        room = min(_CACHED, end - begin - at)
        part = view[:room] if into is None else view[at : at + room]
        count = cast(Any, file).readinto(part)
        if not count:
            return False
        value = crc32(part[:count], value)
        at += count
    return value == piece.crc32[number]
