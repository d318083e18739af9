"""Bytes of tensors: to be written as they lie in memory, and to be read with their checksum."""

from __future__ import annotations

from typing import Any, BinaryIO, cast

import torch

from shardwise.checkpoint.format.checksum import BLOCK, blocks, crc32
from shardwise.checkpoint.format.pieces import Piece

# What a core's cache holds: bytes are hashed before they leave it.
_CACHED = 2**20


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a tensor, from its first element to its last; a copy only where it must be one."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy()))


def write_hashed(file: BinaryIO, data: memoryview) -> tuple[int, ...]:
    """Write bytes; returns the checksum of every block of them."""
    found = []
    for begin, end in blocks(len(data)):
        value = 0
        for at in range(begin, end, _CACHED):
            part = data[at : min(at + _CACHED, end)]
            value = crc32(part, value)
            file.write(part)
        found.append(value)
    return tuple(found)


def read_block(file: BinaryIO, piece: Piece, number: int, into: memoryview | None = None) -> bool:
    """Read one block of a piece; False where it is not what was saved."""
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
