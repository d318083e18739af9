"""Numbers as screens write them: no sign of nothing, no range of one value."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from shardwise.step.words import (
    collective_names,
    error_words,
    percent,
    percent_points,
    range_text,
    ratio_text,
    signed_percent,
    speed_ratio_text,
)

SHARES = st.floats(min_value=-20, max_value=20, allow_nan=False)
RATIOS = st.floats(min_value=1e-4, max_value=1e4, allow_nan=False)
DIGITS = st.integers(min_value=0, max_value=3)


def number(text: str) -> float:
    """The number a text begins with."""
    found = re.match(r"[+-]?[\d,]+(\.\d+)?(e[+-]\d+)?", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


@given(SHARES, DIGITS)
def test_a_number_reads_back_to_what_it_shows_and_zero_has_no_sign(
    value: float, digits: int
) -> None:
    for text in (
        percent(value, digits),
        signed_percent(value, digits),
        percent_points(value, digits),
    ):
        assert abs(number(text) - 100 * value) <= 0.5 * 10**-digits * (1 + 1e-9)
        if number(text) == 0:
            assert text[0] not in "+-"
    for text in (signed_percent(value, digits), percent_points(value, digits)):
        if number(text) != 0:
            assert text[0] == ("+" if value > 0 else "-")


@given(SHARES)
def test_an_error_never_shows_a_sign_of_nothing(error: float) -> None:
    text, tone = error_words(error)
    assert text == "exact" or text[0] not in "+-" or number(text) != 0
    assert (tone == "good") == (abs(error) < 0.03)


@given(SHARES, SHARES, DIGITS)
def test_a_range_has_two_different_ends(low: float, high: float, digits: int) -> None:
    ends = range_text(low, high, lambda share: percent(share, digits)).split(" to ")
    assert len(set(ends)) == len(ends)
    assert ends[0] == percent(low, digits)
    assert ends[-1] == percent(high, digits)


@given(RATIOS)
def test_a_pace_says_the_direction_and_the_size(ratio: float) -> None:
    text = speed_ratio_text(ratio)
    if text == "as fast":
        assert abs(ratio - 1) <= 0.005
    elif text.endswith("x as fast"):
        assert abs(number(text) - ratio) <= 0.05 * (1 + 1e-9)
        assert ratio >= 2
    else:
        assert text.endswith("faster" if ratio > 1 else "slower")
        assert abs(number(text) - 100 * abs(ratio - 1)) <= 0.5 * (1 + 1e-9)
        assert number(text) > 0


@given(RATIOS)
def test_a_multiple_is_never_zero(ratio: float) -> None:
    assert abs(number(ratio_text(ratio)) / ratio - 1) <= 0.5


def test_collectives_of_one_size_are_told_apart_by_their_axis() -> None:
    shard, tensor = ("all_gather", 8, "shard"), ("all_gather", 8, "tensor")
    alone, unknown = ("reduce_scatter", 8, "shard"), ("all_reduce", 8, "")
    names = collective_names([shard, tensor, alone, unknown])
    assert names[shard] == "all-gather, shard 8"
    assert names[tensor] == "all-gather, tensor 8"
    assert names[alone] == "reduce-scatter, groups of 8"
    assert names[unknown] == "all-reduce, groups of 8"
