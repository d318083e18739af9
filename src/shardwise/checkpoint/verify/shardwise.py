"""Verify a Shardwise checkpoint: every byte of it has a checksum."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardwise.checkpoint.format import index_v1, layout, manifest
from shardwise.checkpoint.format.broken import BrokenFileError
from shardwise.checkpoint.format.folder import Folder
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece
from shardwise.checkpoint.format.rank_index import index_of
from shardwise.checkpoint.format.read_checkpoint import (
    read_index_v1,
    read_manifest,
    read_rank,
    read_ranks,
)
from shardwise.checkpoint.format.shard import file_of
from shardwise.checkpoint.verify.coverage import problems_of
from shardwise.checkpoint.verify.extents import (
    arrange,
    lost_tensors_words,
    pieces_by_file,
    truncated_tensors,
)
from shardwise.checkpoint.verify.findings import CheckedCheckpoint, Finding, Progress
from shardwise.checkpoint.verify.opened import head_record, listed_problems
from shardwise.checkpoint.verify.scan import Block, Task, blocks_of, scan

_RANK_FILE = re.compile(r"rank-(\d{5,9})\.(?:safetensors|index)")


class _Contents(NamedTuple):
    """The contents that a checkpoint should have. Files of tensors are read one after another."""

    tensors: int
    # Number of files of ranks, and the bytes of all files of tensors.
    files: int
    bytes: int
    of_tensors: Iterator[tuple[FileRecord, list[Piece]]]
    is_listed: Callable[[str], bool]


def check_shardwise(folder: Folder, progress: Progress, processes: int | None) -> CheckedCheckpoint:
    """Verify a checkpoint of either format; `processes` None reads with one process per core."""
    findings: list[Finding] = []
    contents, files = _Contents(0, 0, 0, iter(()), lambda _: True), 0
    try:
        parsed = read_manifest(folder)
        files = len(parsed.files) + 1
        read = _contents_v1 if parsed.version == 1 else _contents
        contents = read(folder, parsed, findings)
    except BrokenFileError as error:
        findings.append(Finding("broken", error.file, "", error.why))
    read_bytes = 0

    def tasks() -> Iterator[Task]:
        nonlocal read_bytes
        for record, pieces in contents.of_tensors:
            if (task := _task(folder, record, pieces, findings)) is not None:
                read_bytes += task.bytes
                yield task

    different = list(scan(folder, tasks(), contents.bytes, progress, processes))
    findings += [*different, *_unlisted_files(folder, contents.is_listed)]
    return CheckedCheckpoint(
        folder.url, "shardwise", files + contents.files, contents.tensors, read_bytes, findings
    )


def _contents_v1(folder: Folder, parsed: Manifest, findings: list[Finding]) -> _Contents:
    """The contents of a checkpoint in format 1, whose one index lists all pieces."""
    saved = read_index_v1(folder, parsed)
    findings += (
        Finding("broken", index_v1.NAME, tensor, why) for tensor, why in problems_of(saved)
    )
    pieces = pieces_by_file(saved.pieces)
    records = [record for record in parsed.files if record.name != index_v1.NAME]
    files = [(record, pieces.pop(record.name, [])) for record in records]
    for file, lost in pieces.items():
        why = f"is not in {manifest.NAME}{lost_tensors_words(lost)}"
        findings.append(Finding("broken", file[:200], "", why))
    named = {manifest.NAME, *(record.name for record in parsed.files)}
    total = sum(record.bytes for record in records)
    return _Contents(len(saved.tensors), 0, total, iter(files), named.__contains__)


def _contents(folder: Folder, parsed: Manifest, findings: list[Finding]) -> _Contents:
    """The contents of a checkpoint in format 2; the index of a rank is read with its file."""
    ranks = read_ranks(folder, parsed)
    findings += (
        Finding("broken", layout.NAME, tensor, why) for tensor, why in listed_problems(ranks.layout)
    )
    writers = [rank for rank in range(parsed.world) if any(ranks.table[rank])]
    named = {manifest.NAME, *(record.name for record in parsed.files)}

    def is_listed(name: str) -> bool:
        if (match := _RANK_FILE.fullmatch(name)) is None:
            return name in named
        rank = int(match[1])
        written = rank < parsed.world and any(ranks.table[rank])
        return written and name in (file_of(rank), index_of(rank))

    def of_tensors() -> Iterator[tuple[FileRecord, list[Piece]]]:
        """Yield each file of tensors and its pieces."""
        for rank in range(parsed.world):
            try:
                pieces = read_rank(folder, ranks, rank).pieces
            except BrokenFileError as error:
                findings.append(Finding("broken", error.file, "", error.why))
                continue
            if any(ranks.table[rank]):
                yield head_record(ranks, rank), pieces

    total = sum(ranks.table[rank].bytes for rank in writers)
    tensors = len(ranks.layout.tensors)
    return _Contents(tensors, 2 * len(writers), total, of_tensors(), is_listed)


def _task(
    folder: Folder, record: FileRecord, pieces: list[Piece], findings: list[Finding]
) -> Task | None:
    """The task to read a file; None if it is missing. Problems are added to `findings`."""

    def broken(why: str, tensor: str = "") -> None:
        findings.append(Finding("broken", record.name[:200], tensor, why))

    try:
        size = folder.size(record.name)
    except FileNotFoundError:
        broken(f"is missing{lost_tensors_words(pieces)}")
        return None
    except (UntrustedError, OSError) as error:
        broken(f"{error}{lost_tensors_words(pieces)}")
        return None
    extents = arrange(pieces, record.head, size)
    if size != record.bytes:
        broken(
            f"has {size:,} bytes, expected {record.bytes:,}{truncated_tensors(extents.truncated)}"
        )
    elif extents.truncated or record.head > size:
        broken(f"is truncated{truncated_tensors(extents.truncated)}")
    for piece in extents.overlapping:
        broken("overlaps another tensor", str(piece))
    if size == record.bytes:
        for begin, end in extents.gaps:
            broken(f"bytes {begin:,} to {end:,} have no checksum")
    head = [Block("", 0, record.head, record.crc32)] if record.head <= size else []
    blocks = [block for piece in extents.readable for block in blocks_of(piece)]
    return Task(folder.url, record.name, [*head, *blocks])


def _unlisted_files(folder: Folder, is_listed: Callable[[str], bool]) -> Iterator[Finding]:
    """Yield findings on files that are not part of the checkpoint."""
    for name in folder.names():
        if is_listed(name):
            continue
        try:
            folder.size(name)
        except UntrustedError as error:
            yield Finding("broken", name, "", str(error))
        except OSError:
            # Deleted in the meantime.
            continue
        else:
            yield Finding("stale", name, "", f"is not in {manifest.NAME}")
