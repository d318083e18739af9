"""Recordings of others: the same numbers as from counting everything again, slowly."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.memory.raw import CATEGORIES
from shardwise.observe.memory.read import read_memory
from shardwise.observe.memory.record import Memory
from shardwise.observe.memory.unpickle import read_pickle
from shardwise.observe.memory.verdict import verdict_of

SNAPSHOTS = ("vanilla_ce_snapshot.pickle", "liger_ce_snapshot.pickle")


def recording(shared: Path, name: str) -> Path:
    path = shared / "traces" / "memory" / name
    if not path.is_file():
        pytest.skip(f"needs {name} in the shared folder")
    return path


def read_one(path: Path) -> Memory:
    (memory,) = read_memory(path)
    return memory


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_snapshots_against_counting_again(shared: Path, name: str) -> None:
    """These histories are whole: nothing lived before their first event."""
    path = recording(shared, name)
    memory, data = read_one(path), read_pickle(path)
    levels, reserved = [0], [0]
    for number in range(1, len(data["device_traces"][0]) + 1):
        alive: dict[int, int] = {}
        held: dict[int, int] = {}
        for one in data["device_traces"][0][:number]:
            if one["action"] == "alloc":
                alive[one["addr"]] = one["size"]
            elif one["action"] == "free_requested":
                del alive[one["addr"]]
            elif one["action"] == "segment_alloc":
                held[one["addr"]] = one["size"]
            elif one["action"] == "segment_free":
                del held[one["addr"]]
        levels.append(sum(alive.values()))
        reserved.append(sum(held.values()))
    assert memory.curve.allocated == levels
    assert memory.curve.reserved == reserved
    assert memory.peak.allocated_bytes == max(levels)
    assert memory.peak.event == levels.index(max(levels))
    assert sum(share.bytes for share in memory.categories) == max(levels)
    assert sum(holder.bytes for holder in memory.holders) == max(levels)
    assert memory.problems == ()

    blocks = [block for one in data["segments"] for block in one["blocks"]]
    found = memory.fragmentation
    assert found is not None
    assert found.reserved_bytes == sum(one["total_size"] for one in data["segments"])
    assert found.allocated_bytes == sum(one["allocated_size"] for one in data["segments"])
    assert found.largest_free_bytes == max(
        block["size"] for block in blocks if block["state"] == "inactive"
    )
    # The state at the end is what the history says is left.
    left = [block["requested_size"] for block in blocks if block["state"] == "active_allocated"]
    assert levels[-1] == sum(left)


def test_the_plain_loss_is_told_from_the_fused_one(shared: Path) -> None:
    """Logits of 1024 tokens, 128,000 words and two bytes; the plain loss makes three like them."""
    logits = 1024 * 128_000 * 2
    plain, fused = (read_one(recording(shared, name)) for name in SNAPSHOTS)
    assert plain.peak.allocated_bytes // logits == 4
    assert fused.peak.allocated_bytes // logits == 1
    assert plain.loss_bytes is not None
    assert plain.loss_bytes // logits == 3
    assert verdict_of(plain).cause == "loss"
    assert verdict_of(fused).cause == "none"
    assert plain.leak.found is None
    assert fused.leak.found is None


def test_a_profilers_timeline_against_counting_again(shared: Path) -> None:
    path = recording(shared, "hta_memory_timeline.raw.gz")
    rows: list[Any] = json.loads(gzip.decompress(path.read_bytes()))
    memory = read_one(path)
    before = sum(size for _, action, size, _ in rows if action == 1)
    level, highest = before, before
    at_highest = dict.fromkeys(CATEGORIES, 0)
    now = dict.fromkeys(CATEGORIES, 0)
    for _, action, size, category in rows:
        now[CATEGORIES[category]] += size
        if action == 1:
            continue
        level += size
        if level > highest:
            highest, at_highest = level, dict(now)
    assert memory.peak.allocated_bytes == highest
    assert {share.category: share.bytes for share in memory.categories} == {
        name: size for name, size in at_highest.items() if size
    }
    assert memory.curve.allocated[-1] == sum(size for _, _, size, _ in rows)
    assert memory.problems == ()
    # Five steps of one training, each with its own peak.
    assert memory.leak.found is False
