"""Verify a Shardwise checkpoint: every byte of it has a checksum."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.checkpoint.format import index, manifest
from shardwise.checkpoint.format.folder import Folder
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece, Saved
from shardwise.checkpoint.format.read_checkpoint import read_index, read_manifest
from shardwise.checkpoint.verify.coverage import problems_of
from shardwise.checkpoint.verify.findings import Checked, Finding, Progress
from shardwise.checkpoint.verify.layout import by_file, lay_out, lost_with, truncated_tensors
from shardwise.checkpoint.verify.scan import Block, Task, blocks_of, scan


def check_shardwise(folder: Folder, progress: Progress, processes: int | None) -> Checked:
    findings: list[Finding] = []
    parsed, saved = _read(folder, findings)
    if parsed is None:
        return Checked(folder.url, "shardwise", 0, 0, 0, findings)
    tasks = []
    if saved is not None:
        findings += (
            Finding("broken", index.NAME, tensor, why) for tensor, why in problems_of(saved)
        )
        pieces = by_file(saved.pieces)
        for record in parsed.files:
            if record.name != index.NAME:
                found = _task(folder, record, pieces.pop(record.name, []), findings)
                tasks += [found] if found else []
        for file, lost in pieces.items():
            why = f"is not in {manifest.NAME}{lost_with(lost)}"
            findings.append(Finding("broken", file[:200], "", why))
    findings += scan(folder, tasks, progress, processes)
    findings += _unlisted(folder, {manifest.NAME, *(record.name for record in parsed.files)})
    tensors = len(saved.tensors) if saved else 0
    read = sum(task.bytes for task in tasks)
    return Checked(folder.url, "shardwise", len(parsed.files) + 1, tensors, read, findings)


def _read(folder: Folder, findings: list[Finding]) -> tuple[Manifest | None, Saved | None]:
    """The manifest and the index; None for each that is broken."""
    file, parsed = manifest.NAME, None
    try:
        parsed = read_manifest(folder)
        file = index.NAME
        return parsed, read_index(folder, parsed)
    except UntrustedError as error:
        findings.append(Finding("broken", file, "", str(error)))
    return parsed, None


def _task(
    folder: Folder, record: FileRecord, pieces: list[Piece], findings: list[Finding]
) -> Task | None:
    """The task to read a file; None if it is missing."""

    def broken(why: str, tensor: str = "") -> None:
        findings.append(Finding("broken", record.name[:200], tensor, why))

    try:
        size = folder.size(record.name)
    except FileNotFoundError:
        broken(f"is missing{lost_with(pieces)}")
        return None
    except (UntrustedError, OSError) as error:
        broken(f"{error}{lost_with(pieces)}")
        return None
    layout = lay_out(pieces, record.head, size)
    if size != record.bytes:
        broken(
            f"has {size:,} bytes, expected {record.bytes:,}{truncated_tensors(layout.truncated)}"
        )
    elif layout.truncated or record.head > size:
        broken(f"is truncated{truncated_tensors(layout.truncated)}")
    for piece in layout.overlapping:
        broken("overlaps another tensor", str(piece))
    if size == record.bytes:
        for begin, end in layout.gaps:
            broken(f"bytes {begin:,} to {end:,} have no checksum")
    head = [Block("", 0, record.head, record.crc32)] if record.head <= size else []
    blocks = [block for piece in layout.readable for block in blocks_of(piece)]
    return Task(folder.url, record.name, [*head, *blocks])


def _unlisted(folder: Folder, named: set[str]) -> Iterator[Finding]:
    for name in folder.names():
        if name in named:
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
