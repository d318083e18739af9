"""The verdict on a memory recording as data: main cause of the peak, and the headroom left.

`report/memory.py` puts it into words.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.observe.memory.record import Memory

Cause = Literal[
    "leak",
    "fragmentation",
    "loss",
    "optimizer_step",
    "not_recorded",
    "activations",
    "model_states",
    "none",
]
# Share of a device that should stay free.
HEADROOM = 0.1
# Shares of the peak from which a cause is reported.
_NOTABLE, _LARGE, _MAJORITY = 0.1, 0.25, 0.5
_MODEL_STATES = ("parameters", "gradients", "optimizer")
_ACTIVATIONS = ("forward", "activations", "working")


class MemoryVerdict(NamedTuple):
    """The most certain cause of the peak, and the bytes it explains.

    For "leak" the bytes are per step, for "fragmentation" those reserved but unused at the peak.
    They are None for "none". `headroom_bytes` is None if the capacity is unknown.
    """

    cause: Cause
    bytes: int | None
    headroom_bytes: int | None
    headroom_is_low: bool


def verdict_of(
    memory: Memory, capacity: int | None = None, headroom: float = HEADROOM
) -> MemoryVerdict:
    """Find the main cause of the peak of a recording, and the headroom that is left.

    `capacity` is the memory of the device in bytes, `headroom` the share that should stay free.
    """
    cause, size = _cause(memory)
    left = None if capacity is None else headroom_of(memory, capacity)
    low = left is not None and capacity is not None and left < headroom * capacity
    return MemoryVerdict(cause, size, left, low)


def headroom_of(memory: Memory, capacity: int) -> int:
    """Bytes of the capacity that stay free at the maximum of reserved bytes.

    Of allocated bytes where reserved bytes are unknown. Negative if the capacity is exceeded.
    """
    reserved = memory.curve.reserved
    return capacity - (memory.peak.allocated_bytes if reserved is None else max(reserved))


def loss_dominates(memory: Memory) -> bool:
    """Whether the loss holds at least a quarter of the peak."""
    return (memory.loss_bytes or 0) >= max(1, _LARGE * memory.peak.allocated_bytes)


def one_owner_dominates(memory: Memory) -> bool:
    """Whether one line of code holds at least half of the peak."""
    first = memory.holders[0] if memory.holders else None
    threshold = _MAJORITY * memory.peak.allocated_bytes
    return first is not None and first.file is not None and first.bytes >= threshold


def _cause(memory: Memory) -> tuple[Cause, int | None]:
    """The most certain cause that stands out, and the bytes it explains."""
    peak = memory.peak.allocated_bytes
    leak = memory.leak
    if leak.found and leak.bytes_per_step:
        return "leak", leak.bytes_per_step
    fragmentation = memory.fragmentation
    if fragmentation is not None and memory.peak.reserved_bytes:
        unused = fragmentation.unused_at_peak_bytes or 0
        if unused >= _NOTABLE * memory.peak.reserved_bytes or fragmentation.retries:
            return "fragmentation", unused
    if loss_dominates(memory):
        return "loss", memory.loss_bytes
    if (memory.transient_bytes or 0) >= max(1, _NOTABLE * peak):
        return "optimizer_step", memory.transient_bytes
    for cause, categories in _BY_CATEGORY:
        held = sum(share.bytes for share in memory.categories if share.category in categories)
        if peak and held >= _MAJORITY * peak:
            return cause, held
    return "none", None


_BY_CATEGORY: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    ("not_recorded", ("not recorded",)),
    ("activations", _ACTIVATIONS),
    ("model_states", _MODEL_STATES),
)
