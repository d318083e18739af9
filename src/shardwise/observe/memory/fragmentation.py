"""Fragmentation: memory the allocator reserved but cannot use, and its cost."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.observe.memory.allocator import Device, Event, Frame
from shardwise.observe.memory.record import Fragmentation, Peak

# Only requests up to this size are served from small segments.
SMALL = 1 << 20


def fragmentation_of(
    device: Device, peak: Peak, stacks: Sequence[Sequence[Frame]], expandable: bool | None
) -> Fragmentation | None:
    """Measure fragmentation at the end of a recording.

    None without segments, since events do not show free blocks.
    """
    if not device.segments:
        return None
    blocks = [block for segment in device.segments for block in segment.blocks]
    allocated = [block for block in blocks if block.allocated]
    split = cached = largest = request = 0
    for segment in device.segments:
        free = [block.size for block in segment.blocks if block.free]
        if len(free) < len(segment.blocks):
            split += sum(free)
        else:
            cached += sum(free)
        biggest = max(free, default=0)
        largest = max(largest, biggest)
        request = max(request, min(biggest, SMALL) if segment.small else biggest)
    return Fragmentation(
        segments=len(device.segments),
        reserved_bytes=sum(segment.size for segment in device.segments),
        allocated_bytes=sum(block.size for block in allocated),
        rounding_bytes=sum(b.size - b.requested for b in allocated if b.requested is not None),
        awaiting_bytes=sum(block.size for block in blocks if not block.allocated | block.free),
        split_bytes=split,
        cached_bytes=cached,
        largest_free_bytes=largest,
        largest_request_bytes=request,
        unused_at_peak_bytes=None
        if peak.reserved_bytes is None
        else peak.reserved_bytes - peak.allocated_bytes,
        out_of_memory=sum(event.action == "oom" for event in device.events),
        retries=count_retries(device.events, stacks),
        expandable=expandable,
    )


def count_retries(events: Sequence[Event], stacks: Sequence[Sequence[Frame]]) -> int:
    """Number of times the device was full and the allocator freed cached segments to retry.

    A retry frees several segments and allocates one right after; `empty_cache` frees segments too,
    but its name is in the stack.
    """
    count, freeing = 0, False
    for event in events:
        if event.action in ("segment_free", "segment_unmap"):
            requested = event.stack is not None and any(
                "empty_cache" in f.function or "emptyCache" in f.function
                for f in stacks[event.stack]
            )
            freeing = not requested
        elif event.action in ("segment_alloc", "segment_map"):
            count += freeing
            freeing = False
        elif event.action in ("alloc", "free_requested", "oom"):
            freeing = False
    return count
