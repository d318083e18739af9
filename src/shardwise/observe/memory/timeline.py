"""Lifetimes of a device's allocations, and the curves of memory over time.

The allocator keeps only its last events, so a history starts in the middle and frees memory whose
allocation it does not show. The memory that was live at its start is computed backwards from the
final state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shardwise.observe.memory.allocator import Device, Event
from shardwise.observe.memory.record import Curve

_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Allocation(NamedTuple):
    """Bytes that are live after event `born` and until event `died`.

    `born` is 0 if the allocation was live before the first event; `died` is None if it is live
    after the last. `recorded` is False where its stack was lost with older events.
    """

    size: int
    stack: int | None
    born: int
    died: int | None
    recorded: bool

    def alive_after(self, event: int) -> bool:
        """Whether the allocation is live after an event, given by its number."""
        return self.born <= event and (self.died is None or event < self.died)


class History(NamedTuple):
    """Allocations ordered by birth, the curves, and sentences on gaps and contradictions."""

    allocations: tuple[Allocation, ...]
    curve: Curve
    problems: tuple[str, ...]


def history_of(device: Device) -> History:
    """The lifetimes of all allocations of a device, and its curves of memory."""
    at_start, lost = _alive_at_start(device)
    allocations, contradictions = _follow(device.events, at_start)
    allocated = _allocated(allocations, len(device.events))
    reserved = _reserved(device)
    if reserved is not None and any(r < a for r, a in zip(reserved, allocated, strict=True)):
        reserved = None
    curve = Curve(allocated, reserved, _seconds(device.events))
    problems = []
    if lost and device.segments:
        problems.append(f"{lost} allocations are neither freed nor in the final state")
    if contradictions:
        problems.append(f"{contradictions} contradictory events were skipped")
    if reserved is None and device.segments:
        problems.append("reserved memory is unknown: events and segments disagree")
    if not device.segments:
        problems.append(
            "no final state recorded: memory allocated before and still live is missing"
        )
    if not device.events:
        problems.append("no event history recorded: the peak is the final state")
    return History(allocations, curve, tuple(problems))


def _alive_at_start(device: Device) -> tuple[dict[int, Allocation], int]:
    """Allocations live before the first event, by address.

    Also the number of allocations in the history that are neither freed nor in the final state.
    """
    alive = {
        block.address: Allocation(
            block.size if block.requested is None else block.requested,
            block.stack,
            0,
            None,
            block.stack is not None,
        )
        for segment in device.segments
        for block in segment.blocks
        if block.allocated
    }
    lost = 0
    for event in reversed(device.events):
        if event.address is None:
            continue
        if event.action == "free_requested":
            # This event has the stack of the free, not of the allocation.
            alive[event.address] = Allocation(event.size, None, 0, None, recorded=False)
        elif event.action == "alloc" and alive.pop(event.address, None) is None:
            lost += 1
    return alive, lost


def _follow(
    events: Sequence[Event], at_start: dict[int, Allocation]
) -> tuple[tuple[Allocation, ...], int]:
    """Lifetimes of all allocations, ordered by birth, and the number of contradictory events."""
    alive = dict(at_start)
    ended: list[Allocation] = []
    contradictions = 0
    for number, event in enumerate(events, 1):
        if event.address is None:
            continue
        if event.action == "alloc":
            if event.address in alive:
                # An address holds one allocation at a time: its free was not recorded.
                ended.append(alive[event.address]._replace(died=number))
                contradictions += 1
            alive[event.address] = Allocation(event.size, event.stack, number, None, recorded=True)
        elif event.action == "free_requested":
            freed = alive.pop(event.address, None)
            if freed is None:
                contradictions += 1
            else:
                ended.append(freed._replace(died=number))
    return tuple(sorted([*ended, *alive.values()], key=lambda one: one.born)), contradictions


def _allocated(allocations: Sequence[Allocation], events: int) -> list[int]:
    """Allocated bytes before the first event and after each event."""
    change = [0] * (events + 1)
    for one in allocations:
        change[one.born] += one.size
        if one.died is not None:
            change[one.died] -= one.size
    return list(accumulate(change))


def _reserved(device: Device) -> list[int] | None:
    """Reserved bytes before the first event and after each event.

    They are counted back from the final state. None without it, or if a value is negative.
    """
    if not device.segments:
        return None
    change = [0] * (len(device.events) + 1)
    for number, event in enumerate(device.events, 1):
        change[number] = _RESERVES.get(event.action, 0) * event.size
    change[0] = sum(segment.size for segment in device.segments) - sum(change)
    levels = list(accumulate(change))
    return levels if min(levels) >= 0 else None


def _seconds(events: Sequence[Event]) -> float | None:
    """Seconds from the first event to the last; None with fewer than two times."""
    times = [event.time_us for event in events if event.time_us is not None]
    return (max(times) - min(times)) / 1e6 if len(times) > 1 else None
