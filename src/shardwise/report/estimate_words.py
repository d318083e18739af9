"""Sentences about an estimate, for screens and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.predict.rates import is_fitted
from shardwise.report.memory_words import show_memory
from shardwise.spec.cluster import ClusterSpec

if TYPE_CHECKING:
    from shardwise.predict.fit import Change

NO_WAY = "No change of settings makes it fit. Use a shorter sequence, or devices with more memory."


def not_compared(cluster: ClusterSpec) -> str:
    """A sentence for devices whose coefficients are those of a relative."""
    if is_fitted(cluster):
        return ""
    return (
        f"\nNo run on {cluster.device.name} was fitted: times assume the efficiency of a related "
        "device. Published runs on such devices took up to 50% longer."
    )


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
