"""Each cause is found where it was planted, with the bytes it explains; headroom; the curve."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from shardwise.observe.memory.verdict import headroom_of, verdict_of
from shardwise.report.memory import print_memory, sparkline
from tests.observe.memory.build import (
    FORWARD,
    MIB,
    OPTIMIZER,
    PARAMETERS,
    PLAIN,
    block,
    event,
    frame,
    read_one,
    segment,
    snapshot,
)

A, B = 0x1000_0000, 0x2000_0000


def two(
    kept: int, kept_by: Any, freed: int, freed_by: Any, free: int = 0, **more: Any
) -> dict[str, Any]:
    """`kept` MiB that stay, `freed` that go again, and `free` that are reserved for nothing."""
    blocks = [block(A, kept * MIB, frames=kept_by), block(B, (freed + free) * MIB, "inactive")]
    return snapshot(
        [segment(blocks)],
        [event("alloc", A, kept * MIB, kept_by), event("alloc", B, freed * MIB, freed_by),
         event("free_requested", B, freed * MIB, freed_by)],
        **more,
    )  # fmt: skip


def retried(data: dict[str, Any]) -> dict[str, Any]:
    """The same after a burst that gave a segment back for another."""
    before = [event("segment_alloc", 7, MIB), event("segment_free", 7, MIB),
              event("segment_alloc", 9, MIB), event("segment_free", 9, MIB)]  # fmt: skip
    return {**data, "device_traces": [[*before, *data["device_traces"][0]]]}


@pytest.mark.parametrize(
    ("data", "cause", "mebibytes"),
    [
        (two(8, PLAIN, 2, OPTIMIZER), "optimizer_step", 2),
        (two(4, PLAIN, 6, FORWARD), "activations", 6),
        (two(9, PARAMETERS, 1, PLAIN), "model_states", 9),
        (two(9, PLAIN, 1, PLAIN), "none", None),
        (two(5, PLAIN, 5, PLAIN, free=5), "fragmentation", 5),
        (retried(two(9, PLAIN, 1, PLAIN)), "fragmentation", 0),
        (
            two(5, PLAIN, 5, PLAIN, free=5, allocator_settings={"expandable_segments": True}),
            "fragmentation",
            5,
        ),
        (
            snapshot([segment([block(A, 8 * MIB, "inactive")])],
                     [event("free_requested", A, 8 * MIB)]),
            "not_recorded",
            8,
        ),
    ],
)  # fmt: skip
def test_a_cause_is_named_where_it_was_planted(
    data: dict[str, Any], cause: str, mebibytes: int | None
) -> None:
    verdict = verdict_of(read_one(data))
    assert verdict.cause == cause
    assert verdict.bytes == (None if mebibytes is None else mebibytes * MIB)
    screen = io.StringIO()
    out = Console(file=screen, width=80, highlight=False, markup=False, emoji=False)
    print_memory([read_one(data)], 5, None, out)
    assert len(screen.getvalue().splitlines()[2]) <= 80


def test_room_counts_from_the_most_that_was_reserved() -> None:
    memory = read_one(two(8, PLAIN, 2, PLAIN))
    assert headroom_of(memory, 100 * MIB) == 90 * MIB
    for capacity, left, low in ((100, 90, False), (11, 1, True), (9, -1, True)):
        verdict = verdict_of(memory, capacity * MIB)
        assert (verdict.headroom_bytes, verdict.headroom_is_low) == (left * MIB, low)
    assert verdict_of(memory).headroom_bytes is None


def test_a_curve_in_text_is_as_high_as_its_highest() -> None:
    assert sparkline([0, 1, 4, 8], 8, 10) == " ▁▄█"
    assert sparkline([1, 8, 2, 2, 0, 0], 8, 3) == "█▂ "
    assert sparkline([0, 0], 0, 5) == "  "


def test_names_from_a_file_cannot_move_the_cursor_or_break_the_screen() -> None:
    hostile = [frame("/x/\x1b[2J\n\ud800" + "y" * 500 + ".py", 3, "f\r\x07" + "z" * 5000)]
    memory = read_one(snapshot([segment([block(A, 5, frames=hostile)])],
                               [event("alloc", A, 5, hostile)]))  # fmt: skip
    screen = io.StringIO()
    out = Console(file=screen, width=80, highlight=False, markup=False, emoji=False)
    print_memory([memory], 5, None, out)
    text = screen.getvalue()
    text.encode()
    assert not set("\x1b\r\x07") & set(text)
    assert max(len(line) for line in text.splitlines()) <= 80
