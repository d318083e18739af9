"""Read the memory.json of a Shardwise run: live tensors during one step, by term."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.observe.memory.allocator import MAX_BYTES
from shardwise.observe.memory.record import Curve, Leak, Memory, Share, peak_of
from shardwise.spec.foreign_text import cut
from shardwise.spec.record import SpecError

SCHEMA = 1
MAX_TERMS = 100
# Losses stay in memory until logged; growth beyond this share of the peak is a leak.
MIN_GROWTH = 0.001


def memory_of_run(data: dict[str, Any], path: Path) -> Memory:
    """Convert a memory.json to a recording; its first point is the start of the step."""
    if data.get("schema") != SCHEMA:
        raise SpecError(
            f"memory: {path} has schema {cut(repr(data.get('schema')), 40)}, not {SCHEMA}; "
            "train the run again with this version"
        )
    terms, points = data.get("terms"), data.get("points")
    if (
        not isinstance(terms, list)
        or not 0 < len(terms) <= MAX_TERMS
        or any(not isinstance(term, str) for term in terms)
        or len(set(terms)) < len(terms)
        or not isinstance(points, list)
    ):
        raise SpecError(
            f"memory: {path} needs a list of terms and a list of points; train the run again"
        )
    terms = [cut(term, 24) for term in terms]
    valid = [point for point in points if _is_point(point, len(terms))]
    if not valid:
        raise SpecError(
            f"memory: {path} has no valid point [event, bytes of every term]; train the run again"
        )
    curve = Curve([sum(point[1:]) for point in valid], None, None)
    peak = peak_of(curve)
    held = sorted(zip(terms, valid[peak.event][1:], strict=True), key=lambda item: -item[1])
    bad = len(points) - len(valid)
    problems = [f"{bad} malformed points were skipped"] if bad else []
    if type(data.get("every")) is int and data["every"] > 1:
        problems.append(f"of every {data['every']} changes only the highest was recorded")
    return Memory(
        path=path,
        source="run",
        device=None,
        curve=curve,
        peak=peak,
        categories=tuple(Share(term, size) for term, size in held if size),
        holders=(),
        leak=_leak(terms, valid[0][1:], valid[-1][1:], peak.allocated_bytes),
        fragmentation=None,
        loss_bytes=None,
        loss_place=None,
        transient_bytes=None,
        problems=tuple(problems),
    )


def _leak(terms: list[str], before: list[int], after: list[int], peak: int) -> Leak:
    """Whether memory grows from the start to the end of the step, and which term grows most.

    `before` and `after` are the bytes of each term, `peak` is the total at the peak.
    """
    growth = sum(after) - sum(before)
    if growth < max(1, MIN_GROWTH * peak):
        return Leak(False, "no_growth", 1, "measured_step")
    most = max(range(len(terms)), key=lambda i: after[i] - before[i])
    return Leak(True, "grows", 1, "measured_step", growth, terms[most])


def _is_point(point: Any, terms: int) -> bool:
    """Whether a point is valid: its event, and the bytes of every term."""
    return (
        isinstance(point, list)
        and len(point) == terms + 1
        and all(type(one) is int and 0 <= one < MAX_BYTES for one in point)
    )
