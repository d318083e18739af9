"""What a checkpoint of ours says it holds: its manifest and its index, as far as they are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardwise.checkpoint.format import index, manifest
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.folder import Folder, read_whole
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Saved

T = TypeVar("T")


def read_told(folder: Folder) -> Manifest:
    """The manifest; UntrustedError says what is wrong with it, without its name."""
    return _read(folder, manifest.NAME, _told)


def read_saved(folder: Folder, told: Manifest) -> Saved:
    """The index that a manifest names; UntrustedError says what is wrong with it."""
    record = next(one for one in told.files if one.name == index.NAME)
    return _read(folder, index.NAME, lambda data: _saved(data, record))


def _told(data: bytes) -> Manifest:
    told = manifest.read_manifest(data)
    names = [record.name for record in told.files]
    if len(set(names)) < len(names):
        raise UntrustedError("names a file twice")
    if index.NAME not in names:
        raise UntrustedError(f"does not name {index.NAME}")
    return told


def _saved(data: bytes, record: FileRecord) -> Saved:
    if len(data) != record.bytes or record.head != record.bytes:
        raise UntrustedError(f"has {len(data):,} bytes, saved with {record.bytes:,}")
    if (value := crc32(data)) != record.crc32:
        raise UntrustedError(f"has checksum {value:08x}, saved with {record.crc32:08x}")
    return index.read_index(data)


def _read(folder: Folder, name: str, understand: Callable[[bytes], T]) -> T:
    try:
        return understand(read_whole(folder, name))
    except FileNotFoundError:
        raise UntrustedError("is missing") from None
    except OSError as error:
        raise UntrustedError(f"cannot be read: {error.strerror or error}") from None
