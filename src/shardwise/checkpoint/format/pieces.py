"""Tensors of a checkpoint, their pieces, and the position of the bytes of each piece."""

from __future__ import annotations

import math
from typing import NamedTuple

# Bytes per element, by torch's name of the dtype.
DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Tensor(NamedTuple):
    """A full tensor: its name, dtype by the name of torch, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Part(NamedTuple):
    """A rectangular part of a tensor, in elements."""

    tensor: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of the part."""
        return math.prod(self.sizes) * DTYPES[self.dtype]


class Piece(NamedTuple):
    """A rectangular part of a tensor, and the bytes of the file that hold it.

    `start` and `length` are in bytes. `crc32` has one checksum per block; None for torch's files,
    which contain their own. An object that is not a tensor has neither offsets nor sizes.
    """

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    crc32: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.tensor} at {list(self.offsets)}" if any(self.offsets) else self.tensor


class CheckpointContent(NamedTuple):
    """The content of a checkpoint. `objects` are entries that are not tensors."""

    tensors: dict[str, Tensor]
    pieces: list[Piece]
    objects: list[Piece]
