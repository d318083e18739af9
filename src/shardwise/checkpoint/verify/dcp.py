"""Verify a checkpoint of torch.distributed.checkpoint (DCP) with the checksums torch stores."""

from __future__ import annotations

import math

from shardwise.checkpoint.foreign import metadata
from shardwise.checkpoint.format.folder import Folder, read_file
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import DTYPES, CheckpointContent, Piece
from shardwise.checkpoint.verify.coverage import problems_of
from shardwise.checkpoint.verify.extents import (
    arrange,
    lost_tensors_words,
    pieces_by_file,
    truncated_tensors,
)
from shardwise.checkpoint.verify.findings import CheckedCheckpoint, Finding, Progress
from shardwise.checkpoint.verify.scan import ArchiveEntry, Task, scan

_NOTE = ".metadata has no checksum: its consistency was checked, not its bytes"


def check_torch(folder: Folder, progress: Progress, processes: int | None) -> CheckedCheckpoint:
    """Verify a checkpoint of torch DCP; `processes` is the most that read, None: one per core."""
    try:
        saved = metadata.read_metadata(read_file(folder, metadata.NAME))
    except FileNotFoundError:
        why = "is missing"
    except UntrustedError as error:
        why = str(error)
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
    else:
        return _check(folder, saved, progress, processes)
    finding = Finding("broken", metadata.NAME, "", why)
    return CheckedCheckpoint(folder.url, "dcp", 0, 0, 0, [finding])


def _check(
    folder: Folder, saved: CheckpointContent, progress: Progress, processes: int | None
) -> CheckedCheckpoint:
    """Verify the files of a checkpoint whose metadata was read."""
    findings = [Finding("broken", metadata.NAME, tensor, why) for tensor, why in problems_of(saved)]
    files = pieces_by_file([*saved.pieces, *saved.objects])
    tasks = []
    for file, pieces in files.items():
        found = _task(folder, file, pieces, saved, findings)
        tasks += [found] if found else []
    read = sum(task.bytes for task in tasks)
    findings += scan(folder, tasks, read, progress, processes)
    for name in folder.names():
        # Other tools keep their files here; only .distcp files look like part of a checkpoint.
        if name.endswith(".distcp") and name not in files:
            findings.append(Finding("stale", name, "", "does not belong to this checkpoint"))
    files_read, tensors = len(files) + 1, len(saved.tensors)
    return CheckedCheckpoint(folder.url, "dcp", files_read, tensors, read, findings, (_NOTE,))


def _task(
    folder: Folder,
    file: str,
    pieces: list[Piece],
    saved: CheckpointContent,
    findings: list[Finding],
) -> Task | None:
    """The task to read a file; None if it is missing. Problems are added to `findings`."""
    try:
        size = folder.size(file)
    except FileNotFoundError:
        findings.append(
            Finding("broken", file[:200], "", f"is missing{lost_tensors_words(pieces)}")
        )
        return None
    except (UntrustedError, OSError) as error:
        findings.append(Finding("broken", file[:200], "", f"{error}{lost_tensors_words(pieces)}"))
        return None
    extents = arrange(pieces, 0, size)
    if extents.truncated:
        end = max(piece.start + piece.length for piece in extents.truncated)
        why = f"has {size:,} of {end:,} bytes{truncated_tensors(extents.truncated)}"
        findings.append(Finding("broken", file, "", why))
    for piece in extents.overlapping:
        why = "overlaps another tensor"
        findings.append(Finding("broken", file, str(piece), why))
    for begin, end in extents.gaps:
        why = f"bytes {begin:,} to {end:,} belong to no tensor"
        findings.append(Finding("stale", file, "", why))
    return Task(folder.url, file, [_archive(piece, saved) for piece in extents.readable])


def _archive(piece: Piece, saved: CheckpointContent) -> ArchiveEntry:
    """The archive that holds a piece."""
    tensor = saved.tensors.get(piece.tensor)
    holds = math.prod(piece.sizes) * DTYPES[tensor.dtype] if tensor else None
    return ArchiveEntry(str(piece), piece.start, piece.length, holds)
