"""Read and check the manifest of a Shardwise checkpoint, and the files that it lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from shardwise.checkpoint.format import index_v1, layout, manifest, rank_index, rank_table
from shardwise.checkpoint.format.broken import BrokenFileError, check_bytes, naming_broken_file
from shardwise.checkpoint.format.folder import Folder, read_file
from shardwise.checkpoint.format.layout import Layout
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import CheckpointContent
from shardwise.checkpoint.format.rank_index import RankIndex
from shardwise.checkpoint.format.rank_table import RankTable

T = TypeVar("T")
# Most bytes of one rank's index: some hundred thousand tensors.
_LARGEST_INDEX = 2**30


class Ranks(NamedTuple):
    """How the ranks of a checkpoint in format 2 divided its tensors, and the files they wrote."""

    layout: Layout
    table: RankTable


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest; raise BrokenFileError if it is missing or invalid."""
    return _read(folder, manifest.NAME, _parse_manifest)


def read_index_v1(folder: Folder, parsed: Manifest) -> CheckpointContent:
    """Read the index of a checkpoint in format 1; raise BrokenFileError if it is invalid."""
    return _read_listed(folder, parsed, index_v1.NAME, index_v1.read_index)


def read_ranks(folder: Folder, parsed: Manifest) -> Ranks:
    """Read layout and table of ranks of a checkpoint in format 2; raises BrokenFileError."""
    world = parsed.world
    return Ranks(
        _read_listed(folder, parsed, layout.NAME, lambda data: layout.read_layout(data, world)),
        RankTable(folder, _listed(parsed, rank_table.NAME), world),
    )


def read_rank(folder: Folder, ranks: Ranks, rank: int) -> RankIndex:
    """Read the index of a rank; raise BrokenFileError if it is invalid.

    It is empty if the rank wrote no files.
    """
    record, name = ranks.table[rank], rank_index.index_of(rank)
    if not any(record):
        if ranks.layout.parts_of(rank):
            raise BrokenFileError(rank_table.NAME, f"has no files of rank {rank}, which has shards")
        return RankIndex([], [])

    def parse(data: bytes) -> RankIndex:
        check_bytes(data, record.index_bytes, record.index_crc32)
        return rank_index.read_rank_index(data, rank, record, ranks.layout)

    return _read(folder, name, parse, _LARGEST_INDEX)


def _parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest; raise UntrustedError unless it lists the files of its format."""
    parsed = manifest.read_manifest(data)
    names = [record.name for record in parsed.files]
    if len(set(names)) < len(names):
        raise UntrustedError("lists a file twice")
    needed = [index_v1.NAME] if parsed.version == 1 else [layout.NAME, rank_table.NAME]
    if missing := [name for name in needed if name not in names]:
        raise UntrustedError(f"does not list {missing[0]}")
    if parsed.version > 1 and len(names) > len(needed):
        raise UntrustedError("lists a file that is not part of its format")
    return parsed


def _read_listed(folder: Folder, parsed: Manifest, name: str, parse: Callable[[bytes], T]) -> T:
    """Read and parse a file that the manifest lists, and compare it with its checksum."""
    record = _listed(parsed, name)

    def checked(data: bytes) -> T:
        check_bytes(data, record.bytes if record.head == record.bytes else -1, record.crc32)
        return parse(data)

    return _read(folder, name, checked)


def _listed(parsed: Manifest, name: str) -> FileRecord:
    """The record of a file in the manifest."""
    return next(one for one in parsed.files if one.name == name)


def _read(folder: Folder, name: str, parse: Callable[[bytes], T], most: int = 2**33) -> T:
    """Read and parse a file of at most `most` bytes; raise BrokenFileError."""
    with naming_broken_file(name):
        return parse(read_file(folder, name, most))
