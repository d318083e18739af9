"""Read a memory recording of any format: one record per device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.observe.file.stream import read_chunks
from shardwise.observe.memory.allocator import Snapshot
from shardwise.observe.memory.fragmentation import fragmentation_of
from shardwise.observe.memory.holders import live_memory_at, owners_of
from shardwise.observe.memory.leak import leak_of
from shardwise.observe.memory.raw import memory_of_rows
from shardwise.observe.memory.read_file import read_file
from shardwise.observe.memory.record import Memory, peak_of
from shardwise.observe.memory.run import memory_of_run
from shardwise.observe.memory.snapshot import read_snapshot
from shardwise.observe.memory.steps import steps_of
from shardwise.observe.memory.timeline import history_of
from shardwise.spec.record import SpecError

RUN_FILE = "memory.json"
_MAX_BYTES = 768 << 20


def read_memory(path: Path) -> tuple[Memory, ...]:
    """Read a snapshot, a raw timeline, a memory.json, or a run folder with a memory.json.

    Returns one recording per device; raises SpecError.
    """
    if path.is_dir():
        if not (path / RUN_FILE).is_file():
            raise SpecError(
                f"memory: {path} has no {RUN_FILE}; give a snapshot file, or a run trained with "
                "measure = true"
            )
        path = path / RUN_FILE
    try:
        # A pickle starts with its protocol, JSON with a bracket.
        start = next(read_chunks(path, []), b"").lstrip()[:1]
        if start in (b"[", b"{"):
            return (_from_json(path),)
        return memories_of(read_snapshot(path))
    except OSError as error:
        raise SpecError(f"memory: cannot read {path}: {error.strerror or error}") from None


def memories_of(snapshot: Snapshot) -> tuple[Memory, ...]:
    """One recording per device of a snapshot."""
    return tuple(_memory(snapshot, number) for number in range(len(snapshot.devices)))


def _memory(snapshot: Snapshot, number: int) -> Memory:
    """The recording of the device at index `number` of a snapshot."""
    device = snapshot.devices[number]
    history = history_of(device)
    owners = owners_of(history.allocations, snapshot.stacks, device.events)
    peak = peak_of(history.curve)
    held = live_memory_at(peak.event, history.allocations, owners)
    steps = steps_of(device, history.allocations, owners)
    return Memory(
        path=snapshot.path,
        source="snapshot",
        device=device.number,
        curve=history.curve,
        peak=peak,
        categories=held.categories,
        holders=held.holders,
        leak=leak_of(history.allocations, owners, history.curve.allocated, steps),
        fragmentation=fragmentation_of(device, peak, snapshot.stacks, snapshot.expandable),
        loss_bytes=held.loss_bytes,
        loss_place=held.loss_place,
        transient_bytes=held.transient_bytes,
        problems=(*snapshot.problems, *history.problems),
    )


def _from_json(path: Path) -> Memory:
    """The recording in a raw timeline or a memory.json."""
    data = _json(path)
    if isinstance(data, list):
        if len(data) == 2 and all(isinstance(one, list) for one in data) and len(data[0]) != 4:
            raise SpecError(
                f"memory: {path} is an aggregated timeline; export it as .raw.json.gz instead"
            )
        return memory_of_rows(data, path)
    if isinstance(data, dict) and "points" in data:
        return memory_of_run(data, path)
    raise SpecError(
        f"memory: {path} is neither a raw memory timeline nor a {RUN_FILE}; give one of these, or "
        "a snapshot of torch.cuda.memory"
    )


def _json(path: Path) -> Any:
    """Decode a JSON file; raise SpecError if it is invalid or needs too much memory."""
    text = read_file(path)  # its SpecError is a ValueError too
    # Before decoding: the least memory that its lists, dicts and values take in Python.
    needed = 64 * (text.count(b"[") + text.count(b"{")) + 40 * text.count(b",")
    if needed > _MAX_BYTES:
        raise SpecError(
            f"memory: {path} needs {needed >> 20:,} MiB to be read, at most {_MAX_BYTES >> 20} are "
            "used; record fewer steps"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise SpecError(f"memory: {path} is not valid JSON; record it again") from None
