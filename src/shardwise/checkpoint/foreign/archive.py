"""The checksums that torch stores with every tensor it saves, and never looks at again.

A tensor in a file of a checkpoint is a zip archive whose entries are stored as they are, each with
its CRC32. Every byte that is no entry's data (headers, padding, the directory) follows from names,
sizes and checksums, so that it is computed and compared: no byte of an archive goes unseen.
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
# Numbers from here on have a place of their own, in 64 bits.
_LARGE = 2**32 - 1
# Names are UTF-8; sizes and checksum follow the data.
_UTF8, _FOLLOWED = 0x0800, 0x0008


class Entry(NamedTuple):
    """One entry as the directory has it; `begin` is where its header is."""

    name: bytes
    crc32: int
    size: int
    begin: int

    @property
    def flags(self) -> int:
        return _UTF8 | _FOLLOWED if self.size else _UTF8


def check_archive(
    window: Window, start: int, length: int, holds: int | None
) -> Iterator[tuple[Severity, str]]:
    """What is wrong with the archive at this place of a file.

    `holds` is how many bytes of a tensor it must have, None for any other object.
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
    # Torch can be told to compute none: then all are zero.
    without = not any(entry.crc32 for entry in entries)
    for entry, value in zip(entries, values, strict=True):
        if value != entry.crc32 and not without:
            name = _shown(entry.name)
            yield "broken", f"{name} has checksum {value:08x}, saved with {entry.crc32:08x}"
    if without and any(values):
        yield "unverifiable", "was saved without a checksum"
    held = sum(entry.size for entry in entries if b"/data/" in entry.name)
    if holds is not None and held < holds:
        yield "broken", f"holds {held:,} bytes of a tensor of {holds:,}"


def _entries(window: Window, start: int, length: int) -> tuple[list[Entry], int]:
    """All that the directory names, in order, and where the directory begins."""
    if length < _TAIL:
        raise UntrustedError("is no archive of a tensor: it is too short")
    tail = window.read(start + length - _TAIL, _TAIL)
    *_, count, size, begin = _END64.unpack_from(tail)
    if tail != _tail(count, size, begin) or begin + size + _TAIL != length:
        raise UntrustedError("is no archive of a tensor: its end is not what torch writes")
    if count > _MOST_ENTRIES or size > _MOST_DIRECTORY:
        raise UntrustedError(f"is no archive of a tensor: it has {count:,} entries")
    directory = window.read(start + begin, size)
    entries, at = [], 0
    while at < size:
        entry, at = _entry(directory, at)
        entries.append(entry)
    begins = [entry.begin for entry in entries]
    if len(entries) != count or begins[:1] != [0] or sorted([*begins, begin])[:-1] != begins:
        raise _wrong_directory()
    return entries, begin


def _wrong_directory() -> UntrustedError:
    return UntrustedError("is no archive of a tensor: its directory is not what torch writes")


def _tail(count: int, size: int, begin: int) -> bytes:
    if max(size, begin) >= 2**63 or count >= 2**16:
        return b""
    end64 = _END64.pack(b"PK\6\6", 44, 0x031E, 0x2D, 0, 0, count, count, size, begin)
    locator = _LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
    small = (min(size, _LARGE), min(begin, _LARGE))
    return end64 + locator + _END.pack(b"PK\5\6", 0, 0, count, count, *small, 0)


def _entry(directory: bytes, at: int) -> tuple[Entry, int]:
    """Read an entry of the directory, write it again, and compare."""
    if at + _DIRECTORY.size > len(directory):
        raise _wrong_directory()
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
        raise _wrong_directory()
    return entry, end


def _directory_bytes(entry: Entry) -> bytes:
    large = _large([entry.size] * 2 if entry.size >= _LARGE else [], entry.begin)
    size, begin = min(entry.size, _LARGE), min(entry.begin, _LARGE)
    lengths = (len(entry.name), len(large), 0, 0, 0)
    head = (b"PK\1\2", 0, 0, entry.flags, 0, 0, 0, entry.crc32, size, size)
    return _DIRECTORY.pack(*head, *lengths, 0, begin) + entry.name + large


def _large(sizes: list[int], begin: int) -> bytes:
    """The field for numbers that need 64 bits; nothing where none does."""
    numbers = [*sizes, begin] if begin >= _LARGE else sizes
    if not numbers:
        return b""
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _checksum(window: Window, start: int, entry: Entry, following: int) -> int:
    """Of the data of an entry, once everything around it is what it must be.

    The header is padded so that the data is aligned; how much follows from where the next entry is.
    """
    large = _large([entry.size, 0] if entry.size >= _LARGE else [], entry.begin)
    after = b""
    if entry.size:
        wide = entry.size >= _LARGE or entry.begin >= _LARGE
        sizes = (entry.crc32, entry.size, entry.size)
        after = struct.pack("<4sI2Q" if wide else "<4s3I", b"PK\7\x08", *sizes)
    data = following - len(after) - entry.size
    fixed = entry.begin + _LOCAL.size + len(entry.name) + len(large) + 4
    padding = data - fixed
    if not 0 <= padding < 2**16 - len(large) - 4:
        raise UntrustedError(f"{_shown(entry.name)} overlaps its neighbours, or is apart from them")
    lengths = (len(entry.name), len(large) + 4 + padding)
    head = _LOCAL.pack(b"PK\3\4", 0, entry.flags, 0, 0, 0, 0, 0, 0, *lengths)
    head += entry.name + large + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    if window.read(start + entry.begin, len(head)) != head:
        raise UntrustedError(f"{_shown(entry.name)} has a header that is not what torch writes")
    value = window.crc32(start + data, entry.size)
    if window.read(start + data + entry.size, len(after)) != after:
        why = "and the directory do not agree on its checksum or size"
        raise UntrustedError(f"{_shown(entry.name)} {why}")
    return value


def _shown(name: bytes) -> str:
    return name.decode(errors="replace").partition("/")[2][:100] or "an entry"
