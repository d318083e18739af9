"""Find the catalogue's device for a device name that torch reports."""

from __future__ import annotations

import re

from shardwise.spec.catalogue import devices
from shardwise.spec.cluster import DeviceSpec

# Parts of a catalogue name that distinguish variants and that torch may leave out.
_VARIANT = re.compile(r"sxm\d?|pcie|\d+gb|\d+w")
# Largest relative difference between the memory that torch reports and the catalogue's.
_MEMORY_TOLERANCE = 0.10


def recognise(reported: str, memory: int) -> DeviceSpec | None:
    """The device that torch calls `reported`, with `memory` bytes; None if that is not clear.

    `NVIDIA H100 80GB HBM3` is H100-SXM: torch's names of PCIe cards contain "PCIe", others do not.
    """
    words = _words(reported)
    found = {
        name: device
        for name, device in devices().items()
        if not device.is_cpu
        and _line(name) <= words
        and ("pcie" in _words(name)) == ("pcie" in words)
        and abs(memory / device.capacity - 1) <= _MEMORY_TOLERANCE
    }
    # The most specific of several: an RTX PRO 6000 Server Edition is also an RTX PRO 6000.
    most = max((len(_line(name)) for name in found), default=0)
    nearest = [device for name, device in found.items() if len(_line(name)) == most]
    return nearest[0] if len(nearest) == 1 else None


def _words(name: str) -> set[str]:
    """The words of a device's name in lower case."""
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _line(name: str) -> set[str]:
    """The words of a catalogue name that torch's name must have."""
    return {word for word in _words(name) if not _VARIANT.fullmatch(word)}
