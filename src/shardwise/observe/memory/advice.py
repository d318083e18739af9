"""Three sentences about a recording: what the peak is, who holds it, what to change."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.observe.memory.record import Memory
from shardwise.spec.quantity import show_gib

# A part of the peak worth a change; free memory that a device should keep.
NOTICED, HEADROOM = 0.1, 0.1
MANY, MOST = 0.25, 0.5
_STATES = ("parameters", "gradients", "optimizer")
_ACTIVATIONS = ("forward", "activations", "working")


class Verdict(NamedTuple):
    """`cause` names in a word what `change` is about; "none" where nothing stands out."""

    peak: str
    holder: str
    change: str
    cause: str


def verdict_of(memory: Memory, capacity: int | None = None, headroom: float = HEADROOM) -> Verdict:
    """The first lines of a screen.

    `capacity` is the memory of the device in bytes, `headroom` the share that should stay free.
    """
    cause, change = _change(memory)
    return Verdict(_peak(memory, capacity, headroom), _holder(memory), change, cause)


def headroom_of(memory: Memory, capacity: int) -> int:
    """Bytes the device has beyond what was reserved at most, or allocated where that is unknown."""
    reserved = memory.curve.reserved
    return capacity - (memory.peak.allocated_bytes if reserved is None else max(reserved))


def _peak(memory: Memory, capacity: int | None, headroom: float) -> str:
    peak = memory.peak
    reserved = "" if peak.reserved_bytes is None else f", {show_gib(peak.reserved_bytes)} reserved"
    said = f"Peak: {show_gib(peak.allocated_bytes)} allocated{reserved}"
    found = memory.fragmentation
    if found is not None and found.out_of_memory:
        said = f"Out of memory. {said}"
    if capacity is None:
        return said + "."
    left = headroom_of(memory, capacity)
    if left < 0:
        return f"{said}; {show_gib(-left)} more than there is."
    only = "" if left >= headroom * capacity else "only "
    return f"{said}; {only}{show_gib(left)} ({left / capacity:.0%}) left."


def _holder(memory: Memory) -> str:
    peak = memory.peak.allocated_bytes
    if not peak:
        return "Nothing was allocated."
    if memory.loss_bytes is not None and memory.loss_bytes >= MANY * peak:
        share = memory.loss_bytes / peak
        place = "" if memory.loss_place is None else f", called at {memory.loss_place}"
        return f"The loss made {share:.0%} of it ({show_gib(memory.loss_bytes)}){place}."
    kinds = ", ".join(
        f"{share.category.replace('_', ' ')} {share.bytes / peak:.0%}"
        for share in memory.categories[:3]
        if share.bytes >= 0.005 * peak
    )
    if not memory.holders:
        return f"Held by {kinds}."
    first = memory.holders[0]
    return f"{first.place} holds {first.bytes / peak:.0%} of it; by kind: {kinds}."


def _change(memory: Memory) -> tuple[str, str]:
    """The first cause that stands out, the most certain before the most general."""
    for cause, change in (
        ("leak", _leak(memory)),
        ("fragmentation", _fragmentation(memory)),
        ("loss", _loss(memory)),
        ("optimizer step", _transient(memory)),
        ("not recorded", _unrecorded(memory)),
        ("activations", _activations(memory)),
        ("states", _states(memory)),
    ):
        if change:
            return cause, f"Change: {change}"
    first = memory.holders[0] if memory.holders else None
    if first is not None and first.file and first.bytes >= MOST * memory.peak.allocated_bytes:
        return "none", f"Nothing stands out: only less at {first.place} lowers the peak."
    return "none", "Nothing stands out to change."


def _leak(memory: Memory) -> str:
    leak = memory.leak
    if not leak.found or not leak.bytes_per_step:
        return ""
    size = show_gib(leak.bytes_per_step)
    if memory.source != "snapshot":
        return f"{leak.place} memory grows by {size} each step; find what keeps it."
    return f"{leak.place} keeps {size} more each step; drop what refers to it."


def _fragmentation(memory: Memory) -> str:
    found = memory.fragmentation
    if found is None or not memory.peak.reserved_bytes:
        return ""
    share = (found.unused_at_peak_bytes or 0) / memory.peak.reserved_bytes
    if share < NOTICED and not found.retries:
        return ""
    told = f"{share:.0%} unused"
    if found.retries:
        told = "1 retry" if found.retries == 1 else f"{found.retries:,} retries"
    if found.expandable:
        return f"leave more room ({told}, though segments are expandable)."
    return f"set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ({told})."


def _loss(memory: Memory) -> str:
    if (memory.loss_bytes or 0) < max(1, MANY * memory.peak.allocated_bytes):
        return ""
    return "use a fused cross entropy, which keeps no copies of the logits."


def _transient(memory: Memory) -> str:
    size = memory.transient_bytes or 0
    if size < max(1, NOTICED * memory.peak.allocated_bytes):
        return ""
    return f"give the optimizer fused=True: its step takes {show_gib(size)} for a moment."


def _unrecorded(memory: Memory) -> str:
    if _part(memory, "not recorded") < MOST:
        return ""
    return "record earlier, or with more max_entries: most of it was there before."


def _activations(memory: Memory) -> str:
    if _part(memory, *_ACTIVATIONS) < MOST:
        return ""
    return "recompute activations (checkpointing) or take a smaller micro-batch."


def _states(memory: Memory) -> str:
    if _part(memory, *_STATES) < MOST:
        return ""
    return "shard parameters, gradients and optimizer over more devices."


def _part(memory: Memory, *categories: str) -> float:
    held = sum(share.bytes for share in memory.categories if share.category in categories)
    return held / memory.peak.allocated_bytes if memory.peak.allocated_bytes else 0.0
