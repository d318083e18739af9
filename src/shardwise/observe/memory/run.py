"""The memory.json of a run of our own: tensors alive during one step, by term."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.observe.memory.allocator import MOST_BYTES
from shardwise.observe.memory.record import Curve, Leak, Memory, Share, peak_of
from shardwise.observe.memory.text import printable
from shardwise.spec.record import SpecError

SCHEMA = 1
MOST_TERMS = 100
# Losses wait in memory to be logged; growth beyond this part of the peak is something else.
NOTICED = 0.001
_EVIDENCE = {
    "parameters": "tensors of the model",
    "optimizer": "states of the optimizer",
    "gradients": "results of a reduction",
    "unsharded_parameters": "filled by an all-gather",
    "reduce_buffers": "given to a reduction",
    "working": "the rest: activations, gradients not reduced",
}


def memory_of_run(data: dict[str, Any], path: Path) -> Memory:
    """Read what `shardwise train` wrote; the first point is the beginning of the step."""
    if data.get("schema") != SCHEMA:
        raise SpecError(
            f"memory: {path} has schema {printable(repr(data.get('schema')), 40)}, not {SCHEMA}"
        )
    terms, points = data.get("terms"), data.get("points")
    if (
        not isinstance(terms, list)
        or not 0 < len(terms) <= MOST_TERMS
        or any(not isinstance(term, str) for term in terms)
        or len(set(terms)) < len(terms)
        or not isinstance(points, list)
    ):
        raise SpecError(f"memory: {path} needs a list of terms and a list of points")
    terms = [printable(term, 24) for term in terms]
    good = [point for point in points if _is_point(point, len(terms))]
    if not good:
        raise SpecError(f"memory: {path} has no point [event, bytes of every term]")
    curve = Curve([sum(point[1:]) for point in good], None, None)
    peak = peak_of(curve)
    held = sorted(zip(terms, good[peak.event][1:], strict=True), key=lambda item: -item[1])
    bad = len(points) - len(good)
    problems = [f"{bad} points cannot be read and are left out"] if bad else []
    if type(data.get("every")) is int and data["every"] > 1:
        problems.append(f"only the highest of {data['every']} changes each was kept")
    return Memory(
        path=path,
        source="run",
        device=None,
        curve=curve,
        peak=peak,
        categories=tuple(
            Share(term, size, _EVIDENCE.get(term, "named by the run"))
            for term, size in held
            if size
        ),
        holders=(),
        leak=_leak(terms, good[0][1:], good[-1][1:], peak.allocated_bytes),
        fragmentation=None,
        loss_bytes=None,
        loss_place=None,
        transient_bytes=None,
        problems=tuple(problems),
    )


def _leak(terms: list[str], before: list[int], after: list[int], peak: int) -> Leak:
    growth = sum(after) - sum(before)
    if growth < max(1, NOTICED * peak):
        more = f"{growth:,} bytes more" if growth > 0 else "no more"
        return Leak(False, f"none: the step ends with {more} than it began with", 1)
    most = max(range(len(terms)), key=lambda i: after[i] - before[i])
    return Leak(True, "one step ends with so much more than it began with", 1, growth, terms[most])


def _is_point(point: Any, terms: int) -> bool:
    return (
        isinstance(point, list)
        and len(point) == terms + 1
        and all(type(one) is int and 0 <= one < MOST_BYTES for one in point)
    )
