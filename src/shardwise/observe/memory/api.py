"""Explain memory snapshots, from Python. What reads traces is not loaded."""

from __future__ import annotations

from pathlib import Path

from shardwise.observe.memory.analysis import MemoryAnalysis, read_memories
from shardwise.observe.memory.verdict import HEADROOM
from shardwise.spec.quantity import QuantityError, parse_bytes
from shardwise.spec.record import SpecError


def memory(
    *paths: str | Path,
    device: int | None = None,
    capacity: str | int | None = None,
    headroom: float = HEADROOM,
) -> MemoryAnalysis:
    """Analyse memory snapshots: peak, owners, leaks, fragmentation.

    Args:
        paths: Snapshots of torch.cuda.memory, raw timelines of torch.profiler, or run folders.
        device: Only this device of a snapshot.
        capacity: Memory of the GPU, such as "80GiB" or bytes, to compute the headroom.
        headroom: Share of the capacity that should stay free.

    Raises:
        SpecError: The files cannot be read; it lists every problem.

    Examples:
        >>> found = shardwise.memory("snapshot.pickle", capacity="80GiB")
        >>> found.memories[0].peak.allocated_bytes
    """
    size = _bytes(capacity) if isinstance(capacity, str) else capacity
    if size is not None and size <= 0:
        raise SpecError("capacity: must be more than 0, such as 80GiB")
    memories = read_memories(Path(path) for path in paths)
    if device is not None:
        known = sorted({one.device for one in memories if one.device is not None})
        memories = [one for one in memories if one.device == device]
        if not memories:
            listed = ", ".join(map(str, known)) or "none"
            raise SpecError(f"device: {device} is not in the recording; it has devices {listed}")
    return MemoryAnalysis(tuple(memories), size, headroom)


def _bytes(text: str) -> int:
    """Parse a size such as "80GiB" to bytes; raise SpecError if it is not a size."""
    try:
        return parse_bytes(text)
    except QuantityError as error:
        raise SpecError(f"capacity: {error}") from None
