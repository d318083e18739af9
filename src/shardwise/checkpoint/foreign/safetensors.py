"""Check Hugging Face safetensors: headers and indexes; the format has no checksums."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from shardwise.checkpoint.format.folder import Folder, LocalFolder, read_file
from shardwise.checkpoint.format.paths import UntrustedError, check_name
from shardwise.checkpoint.verify.findings import CheckedCheckpoint, Finding
from shardwise.spec.unique_keys import KeyTwiceError, unique_keys

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
# Limits of the safetensors library.
_MOST_HEADER, _MOST_INDEX = 100_000_000, 2**30
_SHARD = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.safetensors")
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


class Entry(NamedTuple):
    """A tensor in a file, from byte `start` to `end` after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class LinkedFolder(LocalFolder):
    """A folder whose files may be links, as in the cache of Hugging Face.

    Only headers are read, and only the names of tensors are shown. `only` is the name of one file:
    then the others are ignored.
    """

    def __init__(self, path: Path, only: str | None = None) -> None:
        super().__init__(path)
        self.only = only
        self.url = str(path / only) if only else str(path)

    def names(self) -> list[str]:
        """Names of the files in the folder itself, without subfolders."""
        if self.only:
            return [self.only]
        return sorted(path.name for path in self.path.iterdir() if not path.is_dir())

    def size(self, name: str) -> int:
        return self._file(name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._file(name).open("rb", buffering=0))

    def _file(self, name: str) -> Path:
        """Path of a file; raises UntrustedError for broken links and names outside the folder."""
        path = self.path / check_name(name)
        if not path.is_file():
            if path.is_symlink():
                raise UntrustedError("is a broken link")
            raise FileNotFoundError(name)
        return path


def check_safetensors(folder: Folder) -> CheckedCheckpoint:
    """Check headers and indexes against files; the values of tensors cannot be verified."""
    names = [name for name in folder.names() if "/" not in name]
    files = [name for name in names if name.endswith(SUFFIX)]
    indexes = [name for name in names if name.endswith(INDEX)]
    findings: list[Finding] = []
    held: dict[str, list[Entry]] = {}
    for file in files:
        try:
            held[file] = read_header(folder, file)
        except (UntrustedError, OSError) as error:
            why = str(error) if isinstance(error, UntrustedError) else f"cannot be read: {error}"
            findings.append(Finding("broken", file, "", why))
    indexed: set[str] = set()
    for index in indexes:
        try:
            places = read_index(folder, index)
        except (UntrustedError, OSError) as error:
            findings.append(Finding("broken", index, "", str(error)))
            continue
        indexed |= set(places.values())
        findings += _compare_with_index(index, places, held, set(files))
    alone = [file for file in files if file not in indexed]
    if indexes:
        findings += (Finding("stale", file, "", "is not in the index") for file in alone)
    elif not (isinstance(folder, LinkedFolder) and folder.only):
        findings += _shards(alone, held)
    tensors = sum(len(entries) for entries in held.values())
    if tensors and not any(one.severity == "broken" for one in findings):
        why = f"the format has no checksums: the values of {tensors:,} tensors cannot be verified"
        findings.append(Finding("unverifiable", "", "", why))
    return CheckedCheckpoint(
        folder.url, "safetensors", len(files) + len(indexes), tensors, 0, findings
    )


def read_header(folder: Folder, file: str) -> list[Entry]:
    """Entries of the tensors in a file; raises UntrustedError if the header is inconsistent."""
    size = folder.size(file)
    with folder.open(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise UntrustedError(f"has a header of {length:,} bytes in a file of {size:,}")
        header = _table(opened.read(length), "a header")
    entries = [_entry(name, found) for name, found in header.items() if name != "__metadata__"]
    more = header.get("__metadata__", {})
    if not isinstance(more, dict) or not all(isinstance(value, str) for value in more.values()):
        raise UntrustedError("has metadata that is not a table of strings")
    at = 0
    for entry in sorted(entries, key=lambda one: (one.start, one.end)):
        if entry.start != at:
            wrong = (
                "overlaps the tensor before it" if entry.start < at else "leaves a gap before it"
            )
            raise UntrustedError(f"{entry.name[:100]!r} {wrong}")
        at = entry.end
    if at != size - 8 - length:
        raise UntrustedError(f"has {size - 8 - length:,} bytes of tensors, its header says {at:,}")
    return entries


def read_index(folder: Folder, name: str) -> dict[str, str]:
    """The file of each tensor, as an index says; raises UntrustedError if it is invalid."""
    found = _table(read_file(folder, name, _MOST_INDEX), "an index").get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise UntrustedError("has no valid weight_map")
    for file in set(found.values()):
        check_name(file)
    return found


def _table(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; raise UntrustedError, in which `what` names it."""
    try:
        found = json.loads(data, object_pairs_hook=unique_keys)
    except KeyTwiceError as error:
        raise UntrustedError(f"has {error.key[:100]!r} twice") from None
    except (ValueError, RecursionError):
        raise UntrustedError(f"has {what} that is not JSON") from None
    if not isinstance(found, dict):
        raise UntrustedError(f"has {what} that is not a JSON object")
    return found


def _entry(name: str, found: Any) -> Entry:
    """Parse an entry of a header; raise UntrustedError unless dtype, shape and offsets match."""
    try:
        dtype, shape = found["dtype"], tuple(found["shape"])
        start, end = found["data_offsets"]
        numbers = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, end))
        right = numbers and 8 * (end - start) == _BITS[dtype] * math.prod(shape)
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise UntrustedError(f"{name[:100]!r} has an invalid dtype, shape or offset")
    return Entry(name, dtype, shape, start, end)


def _compare_with_index(
    index: str, places: dict[str, str], held: dict[str, list[Entry]], files: set[str]
) -> Iterator[Finding]:
    """Yield findings on tensors of an index that are not in their file, and the reverse.

    `places` is the index: the file of each tensor. `held` has the entries of readable files.
    """
    by_file: dict[str, set[str]] = {}
    for name, file in places.items():
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        if file not in files:
            why = f"is missing; lost with it: {len(names):,} tensors such as {min(names)}"
            yield Finding("broken", file[:200], "", why)
        if file not in held:
            continue
        there = {entry.name for entry in held[file]}
        for name in sorted(names - there):
            yield Finding("broken", file, name, f"is missing, but listed in {index}")
        for name in sorted(there - names):
            if name in places:
                yield Finding("broken", file, name, f"is also in {places[name]}")
            else:
                yield Finding("stale", file, name, f"is not in {index}")


def _shards(files: Iterable[str], held: dict[str, list[Entry]]) -> Iterator[Finding]:
    """Yield findings on numbered files without an index: missing files, tensors held twice."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file):
            groups.setdefault((match[1], int(match[3])), {})[int(match[2])] = file
    for (prefix, count), shards in groups.items():
        if len(shards) < count:
            first = next(number for number in range(1, count + 1) if number not in shards)
            why = f"{count - len(shards):,} of {count:,} files are missing, such as number {first}"
            yield Finding("broken", f"{prefix}-*{SUFFIX}", "", why)
        seen: dict[str, str] = {}
        for _, file in sorted(shards.items()):
            for entry in held.get(file, []):
                if entry.name in seen:
                    yield Finding("broken", file, entry.name, f"is also in {seen[entry.name]}")
                seen[entry.name] = file
