"""Read and check the manifest and the index of a Shardwise checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardwise.checkpoint.format import index, manifest
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.folder import Folder, read_file
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Saved

T = TypeVar("T")


def read_manifest(folder: Folder) -> Manifest:
    """The manifest; raises UntrustedError, whose message does not name the file."""
    return _read(folder, manifest.NAME, _parse_manifest)


def read_index(folder: Folder, parsed: Manifest) -> Saved:
    """The index of a manifest; raises UntrustedError, whose message does not name the file."""
    record = next(one for one in parsed.files if one.name == index.NAME)
    return _read(folder, index.NAME, lambda data: _parse_index(data, record))


def _parse_manifest(data: bytes) -> Manifest:
    parsed = manifest.read_manifest(data)
    names = [record.name for record in parsed.files]
    if len(set(names)) < len(names):
        raise UntrustedError("lists a file twice")
    if index.NAME not in names:
        raise UntrustedError(f"does not list {index.NAME}")
    return parsed


def _parse_index(data: bytes, record: FileRecord) -> Saved:
    if len(data) != record.bytes or record.head != record.bytes:
        raise UntrustedError(f"has {len(data):,} bytes, expected {record.bytes:,}")
    if (value := crc32(data)) != record.crc32:
        raise UntrustedError(f"has checksum {value:08x}, expected {record.crc32:08x}")
    return index.read_index(data)


def _read(folder: Folder, name: str, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(read_file(folder, name))
    except FileNotFoundError:
        raise UntrustedError("is missing") from None
    except OSError as error:
        raise UntrustedError(f"cannot be read: {error.strerror or error}") from None
