"""Find the catalogue's device for a device name that torch reports."""

from __future__ import annotations

import re

from shardwise.spec.catalogue import devices
from shardwise.spec.cluster import DeviceSpec

# Parts of a catalogue name that distinguish variants and that torch may leave out.
_VARIANT = re.compile(r"SXM\d?|PCIe|\d+GB|\d+W")
# Largest relative difference between the memory that torch reports and the catalogue's.
_MEMORY_TOLERANCE = 0.10


def recognise(reported: str, memory: int) -> DeviceSpec | None:
    """The device that torch calls `reported`, with `memory` bytes; None if that is not clear.

    `NVIDIA H100 80GB HBM3` is H100-SXM: torch's names of PCIe cards contain "PCIe", others do not.
    """
    words = set(re.split(r"[^A-Za-z0-9]+", reported))
    found = [
        device
        for name, device in devices().items()
        if not device.is_cpu
        and {part for part in name.split("-") if not _VARIANT.fullmatch(part)} <= words
        and ("PCIe" in name) == ("PCIe" in words)
        and abs(memory / device.capacity - 1) <= _MEMORY_TOLERANCE
    ]
    return found[0] if len(found) == 1 else None
