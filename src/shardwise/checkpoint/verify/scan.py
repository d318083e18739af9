"""Compare bytes with their checksums, in parallel.

Work is divided into tasks of a few hundred megabytes, so that one large file is read in parallel
like many small ones.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

from shardwise.checkpoint.foreign.archive import check_archive
from shardwise.checkpoint.format.checksum import blocks
from shardwise.checkpoint.format.folder import Folder, find_folder, is_remote
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece
from shardwise.checkpoint.verify.findings import Finding, Progress
from shardwise.checkpoint.verify.window import Window

_LEAST_TASK, _MOST_TASK = 2**25, 2**28
# Below this many bytes one process is faster than starting several.
_MIN_PARALLEL = 2**32
# Concurrent connections to an object store, each for at least this many bytes.
_CONNECTIONS, _MIN_PER_CONNECTION = 16, 2**26


class Block(NamedTuple):
    """Bytes of a file with one checksum; `tensor` is empty if they belong to no tensor."""

    tensor: str
    start: int
    length: int
    crc32: int


class ArchiveEntry(NamedTuple):
    """Bytes of a file that torch wrote for a tensor or another object.

    `holds` is the size of the tensor in bytes; None for another object.
    """

    tensor: str
    start: int
    length: int
    holds: int | None


class Task(NamedTuple):
    """Parts of one file to verify, in order."""

    url: str
    file: str
    parts: Sequence[Block | ArchiveEntry]

    @property
    def bytes(self) -> int:
        return sum(part.length for part in self.parts)


def blocks_of(piece: Piece) -> Iterator[Block]:
    """Yield the blocks of a piece with their checksums."""
    for (begin, end), crc32 in zip(blocks(piece.length), piece.crc32 or (), strict=True):
        yield Block(str(piece), piece.start + begin, end - begin, crc32)


def scan(
    folder: Folder, work: Iterable[Task], total: int, progress: Progress, processes: int | None
) -> Iterator[Finding]:
    """Yield a finding for all bytes that differ from what was saved.

    At most `processes` read; None: one per core, or 16 connections to an object store. Tasks of
    about `total` bytes are taken from `work` as they are needed: a large checkpoint has millions of
    blocks.
    """
    remote = is_remote(folder.url)
    if remote:
        count = min(processes or _CONNECTIONS, max(1, total // _MIN_PER_CONNECTION))
    else:
        count = (processes or _cores()) if total >= _MIN_PARALLEL else 1
    most = min(_MOST_TASK, max(_LEAST_TASK, total // (8 * count)))
    tasks = (part for task in work for part in _divide(task, most))
    if count < 2:
        for task in tasks:
            yield from _read(folder, task)
            progress(task.bytes)
        return
    with _pool(remote, count) as pool:
        started: deque[tuple[Task, Future[list[Finding]]]] = deque()
        for task in tasks:
            started.append((task, pool.submit(_read_in_process, task)))
            if len(started) > 4 * count:
                yield from _await_findings(*started.popleft(), progress)
        while started:
            yield from _await_findings(*started.popleft(), progress)


def _await_findings(
    task: Task, reading: Future[list[Finding]], progress: Progress
) -> list[Finding]:
    """Wait until a task was read, and report its bytes to `progress`; return its findings."""
    found = reading.result()
    progress(task.bytes)
    return found


def _cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(remote: bool, count: int) -> Executor:
    """`count` threads for an object store, or processes for local files."""
    if remote:
        # Threads wait for the network and share connections.
        return ThreadPoolExecutor(count)
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("forkserver"))


def _divide(task: Task, most: int) -> Iterator[Task]:
    """Divide a task into tasks of at most `most` bytes; a part is never divided."""
    parts: list[Block | ArchiveEntry] = []
    held = 0
    for part in task.parts:
        if parts and held + part.length > most:
            yield task._replace(parts=parts)
            parts, held = [], 0
        parts.append(part)
        held += part.length
    if parts:
        yield task._replace(parts=parts)


def _read_in_process(task: Task) -> list[Finding]:
    """Read a task in a worker process."""
    return list(_read(find_folder(task.url), task))


def _read(folder: Folder, task: Task) -> Iterator[Finding]:
    """Yield the findings of a task."""
    try:
        with folder.open(task.file) as file:
            yield from _compare(Window(file), task.file, task.parts)
    except EOFError:
        yield Finding("broken", task.file, "", "was truncated while it was read")
    except OSError as error:
        yield Finding("broken", task.file, "", f"cannot be read: {error.strerror or error}")
    except UntrustedError as error:
        yield Finding("broken", task.file, "", str(error))


def _compare(window: Window, file: str, parts: Sequence[Block | ArchiveEntry]) -> Iterator[Finding]:
    """Yield a finding for each part of a file that differs from its checksum."""
    for part in parts:
        if isinstance(part, ArchiveEntry):
            for severity, why in check_archive(window, part.start, part.length, part.holds):
                yield Finding(severity, file, part.tensor, why)
            continue
        value = window.crc32(part.start, part.length)
        if value != part.crc32:
            where = f"bytes {part.start:,} to {part.start + part.length:,}"
            why = f"{where} have checksum {value:08x}, expected {part.crc32:08x}"
            yield Finding("broken", file, part.tensor, why)
