"""Whether a checkpoint of ours is what was saved: every byte of it has a checksum."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.checkpoint.format import index, manifest
from shardwise.checkpoint.format.folder import Folder
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.opened import read_saved, read_told
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece, Saved
from shardwise.checkpoint.verify.coverage import problems_of
from shardwise.checkpoint.verify.findings import Checked, Finding, Progress
from shardwise.checkpoint.verify.layout import and_with_it, by_file, cut_off, lay_out
from shardwise.checkpoint.verify.scan import Block, Task, blocks_of, scan


def check_ours(folder: Folder, progress: Progress, processes: int | None) -> Checked:
    findings: list[Finding] = []
    told, saved = _read(folder, findings)
    if told is None:
        return Checked(folder.url, "shardwise", 0, 0, 0, findings)
    tasks = []
    if saved is not None:
        findings += (
            Finding("broken", index.NAME, tensor, why) for tensor, why in problems_of(saved)
        )
        pieces = by_file(saved.pieces)
        for record in told.files:
            if record.name != index.NAME:
                found = _task(folder, record, pieces.pop(record.name, []), findings)
                tasks += [found] if found else []
        for file, lost in pieces.items():
            why = f"is not in {manifest.NAME}{and_with_it(lost)}"
            findings.append(Finding("broken", file[:200], "", why))
    findings += scan(folder, tasks, progress, processes)
    findings += _strangers(folder, {manifest.NAME, *(record.name for record in told.files)})
    tensors = len(saved.tensors) if saved else 0
    read = sum(task.bytes for task in tasks)
    return Checked(folder.url, "shardwise", len(told.files) + 1, tensors, read, findings)


def _read(folder: Folder, findings: list[Finding]) -> tuple[Manifest | None, Saved | None]:
    """What the manifest and the index say, as far as they can be trusted."""
    file, told = manifest.NAME, None
    try:
        told = read_told(folder)
        file = index.NAME
        return told, read_saved(folder, told)
    except UntrustedError as error:
        findings.append(Finding("broken", file, "", str(error)))
    return told, None


def _task(
    folder: Folder, record: FileRecord, pieces: list[Piece], findings: list[Finding]
) -> Task | None:
    """A file to be read; None where it is not there."""

    def broken(why: str, tensor: str = "") -> None:
        findings.append(Finding("broken", record.name[:200], tensor, why))

    try:
        size = folder.size(record.name)
    except FileNotFoundError:
        broken(f"is missing{and_with_it(pieces)}")
        return None
    except (UntrustedError, OSError) as error:
        broken(f"{error}{and_with_it(pieces)}")
        return None
    layout = lay_out(pieces, record.head, size)
    if size != record.bytes:
        broken(f"has {size:,} bytes, saved with {record.bytes:,}{cut_off(layout.cut)}")
    elif layout.cut or record.head > size:
        broken(f"ends too early{cut_off(layout.cut)}")
    for piece in layout.overlapping:
        broken("begins before another tensor ends", str(piece))
    if size == record.bytes:
        for begin, end in layout.gaps:
            broken(f"bytes {begin:,} to {end:,} have no checksum")
    head = [Block("", 0, record.head, record.crc32)] if record.head <= size else []
    blocks = [block for piece in layout.right for block in blocks_of(piece)]
    return Task(folder.url, record.name, [*head, *blocks])


def _strangers(folder: Folder, named: set[str]) -> Iterator[Finding]:
    for name in folder.names():
        if name in named:
            continue
        try:
            folder.size(name)
        except UntrustedError as error:
            yield Finding("broken", name, "", str(error))
        except OSError:
            # It went away since.
            continue
        else:
            yield Finding("stale", name, "", f"is not in {manifest.NAME}")
