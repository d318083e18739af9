"""Sentences about an estimate, for screens and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.predict.intervals import Evidence, evidence
from shardwise.spec.cluster import ClusterSpec
from shardwise.step.memory_words import show_memory

if TYPE_CHECKING:
    from shardwise.predict.fit import Change

NO_WAY = "No change of settings makes it fit. Use a shorter sequence, or devices with more memory."


def not_compared(cluster: ClusterSpec) -> str:
    """A sentence for devices without fitted runs."""
    found = evidence(cluster)
    return "" if found == "runs" else "\n" + unfitted_words(cluster.device.name, found)


def unfitted_words(device: str, found: Evidence) -> str:
    """What times of a device follow from that no run was fitted on."""
    if found == "kernels":
        return f"Few runs on {device} were fitted, or none: times follow from its measured kernels."
    return f"No run on {device} was fitted; on such devices runs took up to 50% longer."


def ways_title(ways: Sequence[Change], of: str = "", in_stack: bool = False) -> str:
    """The heading of ways to fit; `of` is the command that has them, where it is another one.

    `in_stack` where the memory is that of a run in another stack.
    """
    whose = f" (options of '{of}'{', memory in this stack' if in_stack else ''})" if of else ""
    risky = " at risk" if all(way.at_risk for way in ways) else ""
    return f"Lower-memory options{risky}{whose}"


def way_words(way: Change) -> str:
    """Options after which it fits, and what it needs then."""
    host = f", and {show_memory(way.host_bytes)} of host memory per device"
    needed = show_memory(way.needed_bytes)
    return f"{way.options}: needs {needed}{host if way.host_bytes else ''}"
