"""The table of a checkpoint's ranks, `ranks.bin`: sizes and checksums of their files.

24 bytes per rank, so that each rank can read it all even if there are 100,000.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shardwise.checkpoint.format.paths import UntrustedError

NAME = "ranks.bin"
_ROW = struct.Struct("<QIIII")
ROW_BYTES = _ROW.size


class RankRecord(NamedTuple):
    """The two files of a rank: tensors with a header, and their index. All 0 if it has none."""

    bytes: int = 0
    head: int = 0
    head_crc32: int = 0
    index_bytes: int = 0
    index_crc32: int = 0


def pack_record(record: RankRecord) -> bytes:
    return _ROW.pack(*record)


class RankTable:
    """Records by rank, unpacked when they are needed."""

    def __init__(self, data: bytes, world: int) -> None:
        if len(data) != world * ROW_BYTES:
            raise UntrustedError(f"has {len(data):,} bytes, expected {world * ROW_BYTES:,}")
        self._data = data

    def __getitem__(self, rank: int) -> RankRecord:
        return RankRecord(*_ROW.unpack_from(self._data, rank * ROW_BYTES))

    def __len__(self) -> int:
        return len(self._data) // ROW_BYTES
