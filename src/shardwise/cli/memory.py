"""`shardwise memory`: what held memory at the peak, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.observe.memory.record import Memory

POINTS = 512


def memory(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Snapshots of torch.cuda.memory, raw timelines of torch.profiler, or run folders."
        ),
    ],
    top: Annotated[int, typer.Option(help="Holders to show.", min=1, max=500)] = 10,
    device: Annotated[
        int | None, typer.Option(help="Only this device of a snapshot.", min=0)
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Memory of the device, such as 80GiB: tells the headroom.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="The share of it that should stay free.", min=0, max=1)
    ] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Read recorded memory: the peak, who holds it, what leaks, what lies in fragments."""
    from shardwise.observe.memory.read import read_memory
    from shardwise.report.memory import print_memory
    from shardwise.spec.record import SpecError

    room = _capacity(capacity)
    found = [one for path in files for one in read_memory(path)]
    if device is not None:
        there = sorted({one.device for one in found if one.device is not None})
        found = [one for one in found if one.device == device]
        if not found:
            known = ", ".join(map(str, there)) or "none is named"
            raise SpecError(f"device: {device} is not in it; devices are: {known}")
    if as_json:
        print_json(
            {
                "schema": 1,
                "kind": "measured",
                "memories": [_plain(one, top, room, headroom) for one in found],
            }
        )
    else:
        print_memory(found, top, room, headroom=headroom)


def _capacity(text: str | None) -> int | None:
    from shardwise.spec.quantity import QuantityError, parse_bytes
    from shardwise.spec.record import SpecError

    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except QuantityError as error:
        raise SpecError(f"capacity: {error}") from None
    if size <= 0:
        raise SpecError("capacity: must be more than nothing, such as 80GiB")
    return size


def _plain(memory: Memory, top: int, capacity: int | None, headroom: float) -> dict[str, Any]:
    from shardwise.observe.memory.advice import headroom_of, verdict_of

    return {
        "path": str(memory.path),
        "source": memory.source,
        "device": memory.device,
        "verdict": verdict_of(memory, capacity, headroom)._asdict(),
        "capacity_bytes": capacity,
        "headroom_bytes": None if capacity is None else headroom_of(memory, capacity),
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
    """The highest moment of every share of the events, at most 512 of them."""
    levels, reserved = memory.curve.allocated, memory.curve.reserved
    count = min(POINTS, len(levels))
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
