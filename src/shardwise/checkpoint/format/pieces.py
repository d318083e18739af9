"""What a checkpoint holds: tensors, the boxes they were cut into, and where the bytes are."""

from __future__ import annotations

import math
from typing import NamedTuple

# Bytes of an element, by the name torch has for it.
DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor as a whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Piece(NamedTuple):
    """One box of a tensor, and the bytes it is in.

    `crc32` has one checksum for every block; None where the bytes themselves say more, as those
    that torch writes do. An object that is no tensor has no offsets and no sizes.
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


class Saved(NamedTuple):
    """Everything a checkpoint says it holds. `objects` are entries that are no tensors."""

    tensors: dict[str, Tensor]
    pieces: list[Piece]
    objects: list[Piece]
