"""Raw memory timeline of torch.profiler: rows of [nanoseconds, action, bytes, category]."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from shardwise.observe.memory.allocator import MAX_BYTES
from shardwise.observe.memory.leak import growth_of
from shardwise.observe.memory.record import Curve, Leak, Memory, Share, peak_of
from shardwise.observe.memory.steps import recurring
from shardwise.spec.record import SpecError

CATEGORIES = ("parameters", "optimizer", "inputs", "temporary", "activations", "gradients",
              "autograd detail", "unknown")  # fmt: skip
_PREEXISTING, _CREATE, _CHANGE, _DESTROY = 1, 2, 3, 4


def _levels(existing: Sequence[Any], events: Sequence[Any]) -> tuple[dict[str, list[int]], int]:
    """Bytes of each category at the start and after each event; and bytes that were missing.

    What was freed but never allocated was allocated before the recording: levels include it.
    """
    levels = {name: [0] * (len(events) + 1) for name in CATEGORIES}
    now = dict.fromkeys(CATEGORIES, 0)
    for row in existing:
        now[CATEGORIES[row[3]]] += row[2]
    lowest = dict(now)
    for number, row in enumerate([None, *events]):
        if row is not None:
            name = CATEGORIES[row[3]]
            now[name] += row[2]
            lowest[name] = min(lowest[name], now[name])
        for name, level in now.items():
            levels[name][number] = level
    missing = {name: -level for name, level in lowest.items() if level < 0}
    for name, level in missing.items():
        levels[name] = [one + level for one in levels[name]]
    return levels, sum(missing.values())


def memory_of_rows(rows: Sequence[Any], path: Path) -> Memory:
    """Convert the rows of a timeline to one recording; malformed rows are skipped and counted."""
    valid = [row for row in rows if _is_row(row)]
    if not valid:
        raise SpecError(
            f"memory: {path} has no rows of [time, action, bytes, category]; export the timeline "
            "as .raw.json.gz"
        )
    events = [row for row in valid if row[1] != _PREEXISTING]
    levels, missing = _levels([row for row in valid if row[1] == _PREEXISTING], events)
    problems = []
    if len(valid) < len(rows):
        problems.append(f"{len(rows) - len(valid)} malformed rows were skipped")
    if missing:
        problems.append(
            f"{missing:,} bytes were freed but never allocated; counted as allocated before the "
            "recording"
        )
    used = {name: level for name, level in levels.items() if max(level)}
    times = [row[0] for row in events if row[0] >= 0]
    curve = Curve(
        allocated=[sum(one) for one in zip(*levels.values(), strict=True)],
        reserved=None,
        seconds=(max(times) - min(times)) / 1e9 if len(times) > 1 else None,
    )
    peak = peak_of(curve)
    parts = {name: level[peak.event] for name, level in used.items() if level[peak.event]}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return Memory(
        path=path,
        source="timeline",
        device=None,
        curve=curve,
        peak=peak,
        categories=tuple(Share(name, size) for name, size in ordered),
        holders=(),
        leak=_leak(events, used),
        fragmentation=None,
        loss_bytes=None,
        loss_place=None,
        transient_bytes=None,
        problems=tuple(problems),
    )


def _leak(events: Sequence[Any], levels: dict[str, list[int]]) -> Leak:
    """Find a leak in the levels by kind; steps are found by allocations that recur."""
    keys: list[Hashable | None] = [None]
    keys += [(row[2], row[3]) if row[1] == _CREATE else None for row in events]
    change = [0, *(row[2] if row[1] in (_CREATE, _DESTROY) else 0 for row in events)]
    steps = recurring(keys, change)
    if steps is None or not levels:
        return Leak(None, "steps_unknown")
    return growth_of(steps.bounds, levels, steps.by)


def _is_row(row: Any) -> bool:
    """Whether a row is valid: [nanoseconds, action, bytes, category]."""
    if not isinstance(row, list) or len(row) != 4 or any(type(one) is not int for one in row):
        return False
    time, action, size, category = row
    signs = {_PREEXISTING: size >= 0, _CREATE: size >= 0, _CHANGE: True, _DESTROY: size <= 0}
    return bool(
        -1 <= time < 1 << 62
        and signs.get(action, False)
        and abs(size) < MAX_BYTES
        and 0 <= category < len(CATEGORIES)
    )
