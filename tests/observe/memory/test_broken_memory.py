"""Broken recordings: a sentence, or an answer whose parts sum and of which none is negative."""

from __future__ import annotations

import io
import json
import math
import pickle
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rich.console import Console

from shardwise.observe.memory.read import memories_of, read_memory
from shardwise.observe.memory.record import Memory
from shardwise.observe.memory.snapshot import snapshot_from
from shardwise.report.memory import print_memory
from shardwise.spec.record import SpecError
from tests.examples import examples
from tests.observe.memory.build import (
    BACKWARD,
    FORWARD,
    block,
    event,
    segment,
    snapshot,
    training,
)

SMALL = snapshot(
    [segment([block(1 << 30, 512, frames=FORWARD), block((1 << 30) + 512, 2048, "inactive")]),
     segment([block(1 << 31, 4096)], device=1)],
    [event("segment_alloc", 1 << 30, 2560, time=5), event("alloc", 1 << 30, 512, FORWARD, 6),
     event("alloc", 1 << 29, 256, BACKWARD, 7), event("free_requested", 1 << 29, 256, [], 8),
     event("free_completed", 1 << 29, 256, [], 9), {"action": "oom", "size": 9}],
    [event("alloc", 1 << 31, 4096)],
    external_annotations=[{"name": "step 1", "stage": "START", "time_us": 5, "device": 0}],
)  # fmt: skip
STEPS = training(5, leak=100, names=True, optimizer=True)
ODD: list[Any] = [
    None, -1, 0, 1, True, 1 << 49, 1 << 50, 1 << 70, 1.5, math.nan, math.inf, "", "x", "\x1b[2J",
    "\ud800", [], {}, [[]], "inactive", "alloc", "free_requested", "segment_free",
]  # fmt: skip


def check(memories: tuple[Memory, ...]) -> None:
    for memory in memories:
        curve, peak = memory.curve, memory.peak
        assert min(curve.allocated) >= 0
        assert max(curve.allocated) == peak.allocated_bytes
        assert sum(share.bytes for share in memory.categories) == peak.allocated_bytes
        assert all(share.bytes >= 0 for share in memory.categories)
        if memory.holders:
            assert sum(holder.bytes for holder in memory.holders) == peak.allocated_bytes
        if curve.reserved is not None:
            assert all(r >= a for r, a in zip(curve.reserved, curve.allocated, strict=True))
        if curve.seconds is not None:
            assert math.isfinite(curve.seconds)
            assert curve.seconds >= 0
        found = memory.fragmentation
        if found is not None:
            numbers = [one for one in found if type(one) is int]
            assert min(numbers) >= 0
            assert found.reserved_bytes >= found.allocated_bytes + found.split_bytes
        assert memory.leak.bytes_per_step is None or memory.leak.bytes_per_step > 0


def check_screen(memories: tuple[Memory, ...]) -> None:
    screen = io.StringIO()
    out = Console(file=screen, width=80, highlight=False, markup=False, emoji=False)
    print_memory(memories, 5, 1 << 30, out)
    text = screen.getvalue()
    text.encode()
    assert "nan" not in text.lower().split()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def mutate(value: Any, chance: Random) -> Any:
    """A copy with one thing in it replaced, removed or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        copied = dict(value)
        if chance.random() < 0.1:
            del copied[key]
        else:
            copied[key] = mutate(value[key], chance)
        return copied
    if isinstance(value, list) and value and chance.random() < 0.9:
        at, how = chance.randrange(len(value)), chance.randrange(10)
        if how == 0:
            return value[:at] + value[at + 1 :]
        if how == 1:
            return [*value, value[at]]
        if how == 2:
            return [value[at], *value]
        return [*value[:at], mutate(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD)


@examples(1000)
@given(st.integers(0, 1 << 40))
def test_mutated_snapshots_never_break_it(seed: int) -> None:
    # One draw for all that is changed: drawing each would take longer than the reading.
    chance = Random(seed)
    mutated = chance.choice([SMALL, STEPS])
    for _ in range(chance.randint(1, 4)):
        mutated = mutate(mutated, chance)
    try:
        memories = memories_of(snapshot_from(mutated, Path("it")))
        check(memories)
        if seed % 8 == 0:
            check_screen(memories)
    except SpecError as error:
        assert all(problem.strip() for problem in error.problems)


RUN = {"schema": 1, "terms": ["a", "b"], "every": 1, "points": [[0, 5, 6], [1, 7, 8], [4, 5, 6]]}
ROWS = [[-1, 1, 50, 0], [3, 2, 9, 4], [4, 3, -9, 4], [4, 3, 9, 5], [5, 4, -9, 5]]
WRITTEN = [pickle.dumps(SMALL, protocol=2), pickle.dumps(SMALL, protocol=4),
           json.dumps(RUN).encode(), json.dumps(ROWS).encode()]  # fmt: skip


@examples(500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 40))
def test_mutated_bytes_never_break_it(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    content = bytearray(chance.choice(WRITTEN))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(max(1, len(content)))
        content[at : at + chance.randint(0, 6)] = chance.randbytes(chance.randint(0, 6))
    path = tmp_path / "recording"
    path.write_bytes(content)
    try:
        memories = read_memory(path)
        check(memories)
        if seed % 8 == 0:
            check_screen(memories)
    except SpecError as error:
        assert all(problem.strip() for problem in error.problems)
