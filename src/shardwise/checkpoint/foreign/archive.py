"""Verify the checksums that torch stores with every tensor, but never checks itself.

A tensor in a torch checkpoint is an uncompressed zip archive whose entries have a CRC32. All other
bytes (headers, padding, the directory) follow from names, sizes and checksums, and are recomputed
and compared: every byte of an archive is verified.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.verify.findings import Severity
from shardwise.checkpoint.verify.window import Window

_LOCAL = struct.Struct("<4s5H3I2H")
_DIRECTORY = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_TAIL = _END64.size + _LOCATOR.size + _END.size
# An archive of one tensor has a handful of entries.
_MOST_ENTRIES, _MOST_DIRECTORY = 1000, 2**18
# Numbers from here on are stored in a 64-bit field.
_LARGE = 2**32 - 1
# Names are UTF-8; sizes and checksum follow the data.
_UTF8, _FOLLOWED = 0x0800, 0x0008


class Entry(NamedTuple):
    """An entry of the directory of an archive; its data has `size` bytes.

    `begin` is the position of its header.
    """

    name: bytes
    crc32: int
    size: int
    begin: int

    @property
    def flags(self) -> int:
        """Flags of the entry in its headers."""
        return _UTF8 | _FOLLOWED if self.size else _UTF8


def check_archive(
    window: Window, start: int, length: int, holds: int | None
) -> Iterator[tuple[Severity, str]]:
    """Yield severity and description of each problem of the archive at this position of a file.

    `holds` is the size of its tensor in bytes; None for any other object.
    """
    try:
        window.hold(start, length)
        entries, end = _entries(window, start, length)
        values = []
        for number, entry in enumerate(entries):
            following = entries[number + 1].begin if number + 1 < len(entries) else end
            values.append(_checksum(window, start, entry, following))
    except UntrustedError as error:
        yield "broken", str(error)
        return
    # Torch can be configured to store zeros instead of checksums.
    without = not any(entry.crc32 for entry in entries)
    for entry, value in zip(entries, values, strict=True):
        if value != entry.crc32 and not without:
            name = _display_name(entry.name)
            yield "broken", f"{name} has checksum {value:08x}, expected {entry.crc32:08x}"
    if without and any(values):
        yield "unverifiable", "was saved without a checksum"
    held = sum(entry.size for entry in entries if b"/data/" in entry.name)
    if holds is not None and held < holds:
        yield "broken", f"has {held:,} of {holds:,} bytes of its tensor"


def _entries(window: Window, start: int, length: int) -> tuple[list[Entry], int]:
    """The entries of the directory, and the position of the directory in the archive.

    Raises UntrustedError if the directory is invalid.
    """
    if length < _TAIL:
        raise UntrustedError("is not a torch archive: too short")
    tail = window.read(start + length - _TAIL, _TAIL)
    *_, count, size, begin = _END64.unpack_from(tail)
    if tail != _end_records(count, size, begin) or begin + size + _TAIL != length:
        raise UntrustedError("is not a torch archive: invalid end record")
    if count > _MOST_ENTRIES or size > _MOST_DIRECTORY:
        raise UntrustedError(f"is not a torch archive: {count:,} entries")
    directory = window.read(start + begin, size)
    entries, at = [], 0
    while at < size:
        entry, at = _entry(directory, at)
        entries.append(entry)
    begins = [entry.begin for entry in entries]
    if len(entries) != count or begins[:1] != [0] or sorted([*begins, begin])[:-1] != begins:
        raise _directory_error()
    return entries, begin


def _directory_error() -> UntrustedError:
    return UntrustedError("is not a torch archive: invalid directory")


def _end_records(count: int, size: int, begin: int) -> bytes:
    """The bytes at the end of an archive of `count` entries.

    Its directory has `size` bytes and starts at byte `begin`. Empty for impossible numbers.
    """
    if max(size, begin) >= 2**63 or count >= 2**16:
        return b""
    end64 = _END64.pack(b"PK\6\6", 44, 0x031E, 0x2D, 0, 0, count, count, size, begin)
    locator = _LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
    small = (min(size, _LARGE), min(begin, _LARGE))
    return end64 + locator + _END.pack(b"PK\5\6", 0, 0, count, count, *small, 0)


def _entry(directory: bytes, at: int) -> tuple[Entry, int]:
    """Parse an entry of the directory at `at`; return it and the position after it.

    Its bytes are compared with recomputed bytes; raises UntrustedError if they differ.
    """
    if at + _DIRECTORY.size > len(directory):
        raise _directory_error()
    found = _DIRECTORY.unpack_from(directory, at)
    crc32, size, named, more, begin = found[7], found[9], found[10], found[11], found[16]
    name_end = at + _DIRECTORY.size + named
    name, extra = directory[at + _DIRECTORY.size : name_end], directory[name_end : name_end + more]
    count = max(0, len(extra) - 4) // 8
    large = struct.unpack_from(f"<{count}Q", extra, 4) if count else ()
    if size == _LARGE and large:
        size, large = large[0], large[2:]
    if begin == _LARGE and large:
        begin = large[0]
    entry = Entry(name, crc32, size, begin)
    end = name_end + more
    if directory[at:end] != _directory_bytes(entry):
        raise _directory_error()
    return entry, end


def _directory_bytes(entry: Entry) -> bytes:
    """Bytes of an entry in the directory."""
    large = _zip64_field([entry.size] * 2 if entry.size >= _LARGE else [], entry.begin)
    size, begin = min(entry.size, _LARGE), min(entry.begin, _LARGE)
    lengths = (len(entry.name), len(large), 0, 0, 0)
    head = (b"PK\1\2", 0, 0, entry.flags, 0, 0, 0, entry.crc32, size, size)
    return _DIRECTORY.pack(*head, *lengths, 0, begin) + entry.name + large


def _zip64_field(sizes: list[int], begin: int) -> bytes:
    """Bytes of the field for 64-bit numbers; empty if it is not needed."""
    numbers = [*sizes, begin] if begin >= _LARGE else sizes
    if not numbers:
        return b""
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _checksum(window: Window, start: int, entry: Entry, following: int) -> int:
    """CRC32 of an entry's data, after checking the bytes around it; raises UntrustedError.

    The header is padded to align the data; the position of the next entry gives the padding.
    """
    large = _zip64_field([entry.size, 0] if entry.size >= _LARGE else [], entry.begin)
    after = b""
    if entry.size:
        wide = entry.size >= _LARGE or entry.begin >= _LARGE
        sizes = (entry.crc32, entry.size, entry.size)
        after = struct.pack("<4sI2Q" if wide else "<4s3I", b"PK\7\x08", *sizes)
    data = following - len(after) - entry.size
    fixed = entry.begin + _LOCAL.size + len(entry.name) + len(large) + 4
    padding = data - fixed
    if not 0 <= padding < 2**16 - len(large) - 4:
        raise UntrustedError(f"{_display_name(entry.name)} overlaps another entry or leaves a gap")
    lengths = (len(entry.name), len(large) + 4 + padding)
    head = _LOCAL.pack(b"PK\3\4", 0, entry.flags, 0, 0, 0, 0, 0, 0, *lengths)
    head += entry.name + large + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    if window.read(start + entry.begin, len(head)) != head:
        raise UntrustedError(f"{_display_name(entry.name)} has an invalid header")
    value = window.crc32(start + data, entry.size)
    if window.read(start + data + entry.size, len(after)) != after:
        raise UntrustedError(
            f"{_display_name(entry.name)}: its checksum or size differs from the directory"
        )
    return value


def _display_name(name: bytes) -> str:
    """Name of an entry in messages, without the name of the archive."""
    return name.decode(errors="replace").partition("/")[2][:100] or "an entry"
