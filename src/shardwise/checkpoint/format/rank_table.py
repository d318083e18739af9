"""The table of a checkpoint's ranks, `ranks.bin`: sizes and checksums of their files.

24 bytes per rank. The table begins with one checksum for each group of ranks, so that a rank reads
only the rows of the groups it needs, and not the rows of 100,000 ranks.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shardwise.checkpoint.format.broken import check_bytes, naming_broken_file
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.folder import Folder
from shardwise.checkpoint.format.manifest import FileRecord
from shardwise.checkpoint.format.paths import UntrustedError

NAME = "ranks.bin"
# Number of ranks whose rows share one checksum.
GROUP = 1024
_ROW = struct.Struct("<QIIII")
_CHECKSUM = struct.Struct("<I")
ROW_BYTES = _ROW.size


class RankRecord(NamedTuple):
    """Sizes and checksums of the two files of a rank; all 0 if the rank has no files.

    The file of tensors has `bytes` in total and a header of `head` bytes; the other is its index.
    """

    bytes: int = 0
    head: int = 0
    head_crc32: int = 0
    index_bytes: int = 0
    index_crc32: int = 0


def pack_record(record: RankRecord) -> bytes:
    """The row of a rank in the table: 24 bytes."""
    return _ROW.pack(*record)


def write_table(rows: bytes) -> tuple[bytes, FileRecord]:
    """The bytes of the table with these rows, and its record for the manifest.

    The record covers the checksums at the beginning of the table.
    """
    each = GROUP * ROW_BYTES
    groups = [rows[begin : begin + each] for begin in range(0, len(rows), each)]
    head = b"".join(_CHECKSUM.pack(crc32(group)) for group in groups)
    size = len(head) + len(rows)
    return head + rows, FileRecord(name=NAME, bytes=size, head=len(head), crc32=crc32(head))


class RankTable:
    """The `RankRecord` of each rank; a group of ranks is read when one of them is looked up."""

    def __init__(self, folder: Folder, listed: FileRecord, world: int) -> None:
        """Read and check the checksums of groups; raise BrokenFileError if they are corrupt.

        Looking up a rank also raises BrokenFileError.
        """
        self._folder, self._world = folder, world
        self._groups: dict[int, bytes] = {}
        head = -(-world // GROUP) * _CHECKSUM.size
        size = head + world * ROW_BYTES
        with naming_broken_file(NAME):
            if (listed.bytes, listed.head) != (size, head):
                raise UntrustedError(f"has {listed.bytes:,} bytes, expected {size:,}")
            if (found := folder.size(NAME)) != size:
                raise UntrustedError(f"has {found:,} bytes, expected {size:,}")
            self._head = self._read(0, head)
            check_bytes(self._head, head, listed.crc32)

    def __getitem__(self, rank: int) -> RankRecord:
        number, row = divmod(rank, GROUP)
        if number not in self._groups:
            self._groups[number] = self._read_group(number)
        return RankRecord(*_ROW.unpack_from(self._groups[number], row * ROW_BYTES))

    def _read_group(self, number: int) -> bytes:
        """Read the rows of a group, and compare them with their checksum."""
        first, last = number * GROUP, min((number + 1) * GROUP, self._world) - 1
        size = (last + 1 - first) * ROW_BYTES
        (checksum,) = _CHECKSUM.unpack_from(self._head, number * _CHECKSUM.size)
        with naming_broken_file(NAME):
            data = self._read(len(self._head) + first * ROW_BYTES, size)
            check_bytes(data, size, checksum, f"(ranks {first:,} to {last:,})")
        return data

    def _read(self, begin: int, size: int) -> bytes:
        """Read `size` bytes of the table."""
        with self._folder.open(NAME) as file:
            file.seek(begin)
            return file.read(size)
