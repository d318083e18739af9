"""Sentences about an estimate, for screens and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.planning.reasons.warnings import UnfittedDevice
from shardwise.predict.intervals import evidence
from shardwise.spec.cluster import ClusterSpec
from shardwise.step.memory_words import show_memory

if TYPE_CHECKING:
    from shardwise.planning.ways import Change

NOTHING_FITS = (
    "No change of settings makes it fit. Use a shorter sequence, or devices with more memory."
)


def not_compared(cluster: ClusterSpec) -> str:
    """A newline and a sentence about devices without fitted runs; empty for fitted ones."""
    found = evidence(cluster)
    if found == "runs":
        return ""
    return "\n" + UnfittedDevice(device=cluster.device.name, evidence=found).words()


def changes_title(ways: Sequence[Change], of: str = "", in_stack: bool = False) -> str:
    """The heading of a list of options that make a run fit.

    `of` is the command that has the options, if it is another command. `in_stack`: the memory is
    that of the run in another stack.
    """
    whose = f" (options of '{of}'{', memory in this stack' if in_stack else ''})" if of else ""
    risky = " at risk" if all(way.at_risk for way in ways) else ""
    return f"Lower-memory options{risky}{whose}"


def fitting_change_words(way: Change) -> str:
    """The options of a change, and the memory per device that the run then needs.

    Its own memory and, if any, host memory.
    """
    host = f", and {show_memory(way.host_bytes)} of host memory per device"
    needed = show_memory(way.needed_bytes)
    return f"{way.options}: needs {needed}{host if way.host_bytes else ''}"
