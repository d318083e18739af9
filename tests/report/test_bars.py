"""Bars of a terminal: their parts are to scale, in order, and named; the screen stays short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.report.bars import FILLS, FREE, MARK, MIN_SHARE, WIDTH, memory_bar
from shardwise.step.profile import MemoryProfile
from shardwise.step.words import TERMS

GIB = 2**30
SIZES = st.dictionaries(st.sampled_from(sorted(TERMS)), st.integers(0, 60 * GIB), min_size=1)


@given(SIZES, st.integers(0, 9 * GIB))
def test_parts_are_to_scale_and_every_visible_one_is_named(
    terms: dict[str, int], overhead: int
) -> None:
    peak = sum(terms.values())
    capacity, usable, needed = 80 * GIB, 71 * GIB, peak + overhead
    bar, *legend = memory_bar(MemoryProfile(peak, terms), needed, usable, capacity)
    scale = max(needed, capacity)
    assert len(bar) == WIDTH
    drawn = bar.plain
    filled = sum(drawn.count(fill) for fill in FILLS)
    # What is too small to be seen is left out: one part, less than its smallest share.
    assert abs(filled - WIDTH * needed / scale) <= WIDTH * MIN_SHARE + 2
    assert MARK in drawn
    assert set(drawn) <= {*FILLS, FREE, MARK}
    named = " ".join(line.plain for line in legend)
    for fill in set(drawn) & set(FILLS):
        assert f"{fill} " in named
    for term, size in sorted(terms.items(), key=lambda pair: -pair[1])[: len(FILLS) - 2]:
        if needed and size >= MIN_SHARE * needed:
            assert TERMS[term] in named
    assert max(len(line) for line in legend) <= WIDTH
