"""`shardwise memory`: analyse memory snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.observe.memory.record import Memory

MAX_POINTS = 512


def memory(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Snapshots of torch.cuda.memory, raw timelines of torch.profiler, or run folders."
        ),
    ],
    top: Annotated[int, typer.Option(help="Number of owners to show.", min=1, max=500)] = 10,
    device: Annotated[
        int | None, typer.Option(help="Show only this device of a snapshot.", min=0)
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Memory of the GPU, such as 80GiB, to compute the headroom.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="Share of the capacity that should stay free.", min=0, max=1)
    ] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Analyse memory snapshots: peak, owners, leaks, fragmentation."""
    from shardwise.observe.memory.read import read_memory
    from shardwise.report.memory import print_memory
    from shardwise.spec.record import SpecError

    size = _capacity(capacity)
    memories = _read_all(files, read_memory)
    if device is not None:
        known = sorted({one.device for one in memories if one.device is not None})
        memories = [one for one in memories if one.device == device]
        if not memories:
            listed = ", ".join(map(str, known)) or "none"
            raise SpecError(f"--device: {device} is not in the recording; it has devices {listed}")
    if as_json:
        print_json(
            {
                "schema": 2,
                "kind": "measured",
                "memories": [_plain(one, top, size, headroom) for one in memories],
            }
        )
    else:
        print_memory(memories, top, size, headroom=headroom)


def _read_all(files: list[Path], read: Callable[[Path], tuple[Memory, ...]]) -> list[Memory]:
    """All recordings of all files; reports every file that cannot be read."""
    from shardwise.spec.record import SpecError

    memories: list[Memory] = []
    problems: list[str] = []
    for path in files:
        try:
            memories += read(path)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return memories


def _capacity(text: str | None) -> int | None:
    from shardwise.spec.quantity import QuantityError, parse_bytes
    from shardwise.spec.record import SpecError

    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except QuantityError as error:
        raise SpecError(f"--capacity: {error}") from None
    if size <= 0:
        raise SpecError("--capacity: must be more than 0, such as 80GiB")
    return size


def _plain(memory: Memory, top: int, capacity: int | None, headroom: float) -> dict[str, Any]:
    from shardwise.observe.memory.verdict import verdict_of

    return {
        "path": str(memory.path),
        "source": memory.source,
        "device": memory.device,
        "verdict": verdict_of(memory, capacity, headroom)._asdict(),
        "capacity_bytes": capacity,
        "peak": memory.peak._asdict(),
        "seconds": memory.curve.seconds,
        "curve": _curve(memory),
        "categories": [share._asdict() for share in memory.categories],
        "holders": [holder._asdict() for holder in memory.holders[:top]],
        "holders_left_out": max(0, len(memory.holders) - top),
        "loss_bytes": memory.loss_bytes,
        "transient_bytes": memory.transient_bytes,
        "leak": memory.leak._asdict(),
        "fragmentation": None if memory.fragmentation is None else memory.fragmentation._asdict(),
        "problems": memory.problems,
    }


def _curve(memory: Memory) -> dict[str, list[int] | None]:
    """The maximum of every part of the events, at most 512 parts."""
    levels, reserved = memory.curve.allocated, memory.curve.reserved
    count = min(MAX_POINTS, len(levels))
    events = [
        max(
            range(i * len(levels) // count, (i + 1) * len(levels) // count),
            key=levels.__getitem__,
        )
        for i in range(count)
    ]
    return {
        "event": events,
        "allocated_bytes": [levels[event] for event in events],
        "reserved_bytes": None if reserved is None else [reserved[event] for event in events],
    }
