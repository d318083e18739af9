"""Snapshots whose every byte is known: curves, peaks, beginnings in the middle, fragments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.memory.snapshot import snapshot_from
from shardwise.spec.record import SpecError
from tests.observe.memory.build import (
    MIB,
    PLAIN,
    block,
    event,
    frame,
    read,
    read_one,
    segment,
    snapshot,
)

A, B, C, D = 0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000


def test_levels_are_sums_of_what_lives() -> None:
    """A segment of 20 MiB; 6 and 10 MiB allocated, 6 freed, 3 allocated in its place."""
    memory = read_one(
        snapshot(
            [segment([block(A, 3 * MIB), block(A + 3 * MIB, 3 * MIB, "inactive"),
                      block(B, 10 * MIB), block(B + 10 * MIB, 4 * MIB, "inactive")])],
            [
                event("segment_alloc", A, 20 * MIB, time=0),
                event("alloc", A, 6 * MIB, time=100),
                event("alloc", B, 10 * MIB, time=200),
                event("free_requested", A, 6 * MIB, time=300),
                event("free_completed", A, 6 * MIB, time=400),
                event("alloc", A, 3 * MIB, time=500_000),
            ],
        )
    )  # fmt: skip
    assert memory.curve.allocated == [0, 0, 6 * MIB, 16 * MIB, 10 * MIB, 10 * MIB, 13 * MIB]
    assert memory.curve.reserved == [0, *[20 * MIB] * 6]
    assert memory.curve.seconds == 0.5
    assert memory.peak == (3, 6, 16 * MIB, 20 * MIB)
    assert sum(share.bytes for share in memory.categories) == 16 * MIB
    assert sum(holder.bytes for holder in memory.holders) == 16 * MIB
    assert memory.problems == ()


def test_a_history_that_begins_in_the_middle_starts_from_what_the_end_tells() -> None:
    """8 MiB live throughout, 5 MiB are freed that nobody saw come, 2 MiB come and stay."""
    old = [frame("/home/me/early.py", 1, "setup")]
    memory = read_one(
        snapshot(
            [segment([block(A, 8 * MIB, frames=old), block(B, 2 * MIB),
                      block(C, 6 * MIB, "inactive")])],
            [
                event("free_requested", C, 5 * MIB),
                event("free_completed", C, 5 * MIB),
                event("alloc", B, 2 * MIB),
            ],
        )
    )  # fmt: skip
    assert memory.curve.allocated == [13 * MIB, 8 * MIB, 8 * MIB, 10 * MIB]
    assert memory.curve.reserved == [16 * MIB] * 4
    assert memory.peak.event == 0
    held = {holder.place: holder.bytes for holder in memory.holders}
    # The block that is still there says who made it; what was freed took that with it.
    assert held == {"early.py:1 setup": 8 * MIB, "allocated before the recording": 5 * MIB}
    kinds = {share.category: share.bytes for share in memory.categories}
    assert kinds == {"unknown": 8 * MIB, "not recorded": 5 * MIB}


def test_any_window_of_a_history_has_the_levels_of_the_whole() -> None:
    """The ring buffer forgets: whatever is left of the events, the levels are the same."""
    events: list[dict[str, Any]] = [event("segment_alloc", A, 64 * MIB)]
    alive: dict[int, int] = {}
    for number in range(60):
        if number % 3 == 2:
            address = min(alive)
            events.append(event("free_requested", address, alive.pop(address)))
        else:
            address, size = A + number * MIB // 2, (1 + number % 5) * 1000
            alive[address] = size
            events.append(event("alloc", address, size))
    blocks = [block(address, size) for address, size in sorted(alive.items())]
    left = 64 * MIB - sum(alive.values())
    ends = [segment([*blocks, block(D, left, "inactive")])]
    whole = read_one(snapshot(ends, events)).curve
    for start in (1, 7, 30, 59):
        part = read_one(snapshot(ends, events[start:])).curve
        assert part.allocated == whole.allocated[start:]
        assert part.reserved is not None
        assert whole.reserved is not None
        assert part.reserved == whole.reserved[start:]


def test_requested_sizes_count_and_rounding_is_told() -> None:
    memory = read_one(
        snapshot([segment([block(A, 512, requested_size=8), block(A + 512, 2048, "inactive")])],
                 [event("alloc", A, 8)])
    )  # fmt: skip
    assert memory.peak.allocated_bytes == 8
    assert memory.fragmentation is not None
    assert memory.fragmentation.rounding_bytes == 504
    assert memory.fragmentation.allocated_bytes == 512


def test_a_request_larger_than_its_block_is_not_believed() -> None:
    memory = read_one(snapshot([segment([block(A, 512, requested_size=4096)])], []))
    assert memory.peak.allocated_bytes == 512
    assert memory.fragmentation is not None
    assert memory.fragmentation.rounding_bytes == 0


def test_fragments_are_parts_of_what_is_reserved() -> None:
    """Three segments: one in pieces, one free as a whole, one small."""
    pieces = [block(A, 4 * MIB), block(A + 4 * MIB, 7 * MIB, "inactive"),
              block(A + 11 * MIB, 1 * MIB, "active_awaiting_free"),
              block(A + 12 * MIB, 8 * MIB, "inactive")]  # fmt: skip
    small = [block(C, 512), block(C + 512, 2 * MIB - 512, "inactive")]
    memory = read_one(
        snapshot([segment(pieces), segment([block(B, 6 * MIB, "inactive")]),
                  segment(small, kind="small")],
                 [event("alloc", A, 4 * MIB), event("alloc", C, 512)])
    )  # fmt: skip
    found = memory.fragmentation
    assert found is not None
    assert found.segments == 3
    assert found.reserved_bytes == (20 + 6 + 2) * MIB
    assert found.split_bytes == 15 * MIB + 2 * MIB - 512
    assert found.cached_bytes == 6 * MIB
    assert found.awaiting_bytes == 1 * MIB
    assert found.largest_free_bytes == found.largest_request_bytes == 8 * MIB
    assert found.unused_at_peak_bytes == 28 * MIB - 4 * MIB - 512
    assert found.reserved_bytes == (
        found.allocated_bytes + found.awaiting_bytes + found.split_bytes + found.cached_bytes
    )


def test_a_small_segment_serves_only_small_requests() -> None:
    small = [block(C, 512), block(C + 512, 2 * MIB - 512, "inactive")]
    found = read_one(snapshot([segment(small, kind="small")], [])).fragmentation
    assert found is not None
    assert (found.largest_free_bytes, found.largest_request_bytes) == (2 * MIB - 512, 1 * MIB)


def test_retries_are_segments_given_back_for_one_that_is_asked_for() -> None:
    empty_cache = [frame("/env/site-packages/torch/cuda/memory.py", 200, "empty_cache"), *PLAIN]
    memory = read_one(
        snapshot(
            [segment([block(D, 9 * MIB)])],
            [
                event("segment_alloc", A, 4 * MIB),
                event("segment_alloc", B, 4 * MIB),
                # A retry: two are given back, and a larger one fits.
                event("segment_free", A, 4 * MIB),
                event("segment_free", B, 4 * MIB),
                event("segment_alloc", C, 8 * MIB),
                event("alloc", C, 8 * MIB),
                event("free_requested", C, 8 * MIB),
                event("free_completed", C, 8 * MIB),
                # Given back, and only later is another needed: none.
                event("segment_alloc", B, 4 * MIB),
                event("segment_free", B, 4 * MIB),
                event("alloc", B, 0),
                event("free_requested", B, 0),
                event("segment_alloc", B, 4 * MIB),
                event("segment_free", B, 4 * MIB, empty_cache),
                # Asked for by the user: none.
                event("segment_free", C, 8 * MIB, empty_cache),
                event("segment_alloc", D, 9 * MIB),
                event("alloc", D, 9 * MIB),
                {"action": "oom", "size": 99 * MIB, "device_free": 0, "frames": PLAIN},
            ],
        )
    )
    found = memory.fragmentation
    assert found is not None
    assert (found.retries, found.out_of_memory) == (1, 1)
    assert memory.curve.reserved is not None
    assert [one // MIB for one in memory.curve.reserved] == [
        0, 4, 8, 4, 0, 8, 8, 8, 8, 12, 8, 8, 8, 12, 8, 0, 9, 9, 9,
    ]  # fmt: skip


def test_mapping_and_unmapping_reserve_like_segments() -> None:
    memory = read_one(
        snapshot([segment([block(A, 6 * MIB)])],
                 [event("segment_map", A, 2 * MIB), event("segment_map", A + 2 * MIB, 8 * MIB),
                  event("segment_unmap", A + 6 * MIB, 4 * MIB), event("alloc", A, 6 * MIB)])
    )  # fmt: skip
    assert memory.curve.reserved == [0, 2 * MIB, 10 * MIB, 6 * MIB, 6 * MIB]


def test_devices_are_told_apart() -> None:
    first, second = read(
        snapshot([segment([block(A, 1 * MIB)]), segment([block(A, 3 * MIB)], device=2)],
                 [event("alloc", A, 1 * MIB)], [], [event("alloc", A, 3 * MIB)])
    )  # fmt: skip
    assert (first.device, first.peak.allocated_bytes) == (0, 1 * MIB)
    assert (second.device, second.peak.allocated_bytes) == (2, 3 * MIB)


def test_what_is_missing_is_said() -> None:
    only_state = read_one([segment([block(A, 1 * MIB)])])
    assert only_state.peak.allocated_bytes == 1 * MIB
    (problem,) = only_state.problems
    assert "no event history" in problem
    only_history = read_one({"device_traces": [[event("alloc", A, 5)]]})
    assert (only_history.curve.reserved, only_history.fragmentation) == (None, None)
    assert "no final state" in only_history.problems[0]
    disagrees = read_one(snapshot([segment([block(A, 4)])], [event("segment_alloc", A, 400)]))
    assert disagrees.curve.reserved is None
    assert disagrees.peak.reserved_bytes is None
    assert any("disagree" in problem for problem in disagrees.problems)
    odd = read_one(snapshot([segment([block(A, 4)])],
                            [event("alloc", A, 4), event("explode", A, 4), event("alloc", A, -4),
                             {"action": "alloc"}, 7]))  # type: ignore[list-item]  # fmt: skip
    assert any(problem.startswith("4 malformed events") for problem in odd.problems)
    assert odd.peak.allocated_bytes == 4
    lost = read_one(snapshot([segment([block(A, 4)])],
                             [event("alloc", A, 4), event("alloc", B, 4)]))  # fmt: skip
    assert any("neither freed nor" in problem for problem in lost.problems)


@pytest.mark.parametrize("data", [{}, [], {"a": 1}, 7, "x", None, {"segments": []}])
def test_what_is_no_snapshot_is_one_sentence(data: Any) -> None:
    with pytest.raises(SpecError, match="^memory: snapshot.pickle is") as caught:
        read(data)
    assert len(caught.value.problems) == 1


def test_a_stack_is_read_once_however_many_lists_hold_it() -> None:
    """Torch writes a list for every allocation, of frames that nearly all of them share."""
    stacks = [
        [frame("/home/me/model.py", line, "forward") for line in range(kind, kind + 100)]
        for kind in range(2)
    ]
    events = [event("alloc", A + 512 * n, 512, list(stacks[n % 2])) for n in range(400)]
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        found = snapshot_from(snapshot([], events), Path("made"))
    finally:
        sys.setprofile(None)
    (device,) = found.devices
    assert [found.stacks[e.stack or 0] for e in device.events[:4]] == [*found.stacks] * 2
    assert [one.line for one in found.stacks[1]] == list(range(1, 101))
    assert calls < 100 * len(events)


def test_lists_that_unfold_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand times the same segment of a thousand times the same block is a small file."""
    monkeypatch.setattr("shardwise.observe.memory.snapshot.MAX_ROWS", 10_000)
    one = block(A, 0)
    many = {"device": 0, "address": A, "total_size": 0, "blocks": [one] * 1000}
    with pytest.raises(SpecError, match="more than 10,000 blocks and events"):
        snapshot_from({"segments": [many] * 1000}, Path("bomb"))
