"""Text about memory for every screen: bytes needed of a device, and bytes usable.

Needed is tensors at the peak plus allocator overhead. Usable is the limit for needed bytes.
"""

from __future__ import annotations

from shardwise.spec.quantity import GIB
from shardwise.step.profile import MemoryProfile

_UNITS = (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))


def show_memory(size: float) -> str:
    """Bytes as text with one decimal and a binary unit, such as `62.4 GiB`."""
    name, factor = unit_of(size)
    return f"{size / factor:,.1f} {name}"


# What "at risk" means, on every screen.
AT_RISK = "It runs only if the allocator wastes little."


def memory_words(*, tensors: float, needed: float, usable: float, capacity: float) -> str:
    """A sentence about the bytes needed of a device, its parts, and the usable bytes.

    `Memory: 62.4 GiB of 79.1 GiB (usable 63.9 GiB): 60.4 GiB tensors + 2.0 GiB allocator
    overhead.` An overhead that rounds to nothing is left out, as on a CPU.
    """
    sentence = (
        f"Memory: {show_memory(needed)} of {show_memory(capacity)} (usable {show_memory(usable)})"
    )
    name, factor = unit_of(needed)
    # The overhead is the difference of the rounded values, so that the shown sum is exact.
    shown = round(tensors / factor, 1)
    overhead = round(needed / factor, 1) - shown
    if overhead < 0.05:
        return f"{sentence}."
    return f"{sentence}: {shown:,.1f} {name} tensors + {overhead:,.1f} {name} allocator overhead."


def profile_memory_words(memory: MemoryProfile) -> str:
    """`memory_words` for a prediction; for a measurement, a sentence about its peak."""
    if memory.needed_bytes is None or memory.usable_bytes is None or memory.capacity_bytes is None:
        return f"Memory: {show_memory(memory.peak_allocated_bytes)} of tensors at the peak."
    return memory_words(
        tensors=memory.peak_allocated_bytes,
        needed=memory.needed_bytes,
        usable=memory.usable_bytes,
        capacity=memory.capacity_bytes,
    )


def shortfall_words(needed: float, usable: float) -> str:
    """Needed and usable bytes as a predicate: `needs 25.9 GiB, 18.1 GiB usable`."""
    return f"needs {room_words(needed, usable)}"


def room_words(needed: float, usable: float) -> str:
    """Needed and usable bytes as text: `25.9 GiB, 18.1 GiB usable`."""
    return f"{show_memory(needed)}, {show_memory(usable)} usable"


def unit_of(size: float) -> tuple[str, int]:
    """The largest binary unit that is not larger than `size` bytes, and the unit's bytes."""
    return next((unit for unit in _UNITS if size >= unit[1]), _UNITS[-1])
