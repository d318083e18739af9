"""A term of two records: what is not known, and what is 0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.step.comparison import Term, traffic_terms

SIZES = st.floats(min_value=1, max_value=1e6)


@given(SIZES, SIZES)
def test_error_and_change_lead_from_one_value_to_the_other(first: float, second: float) -> None:
    term = Term("step", "s", first, second)
    assert term.error is not None
    assert term.change is not None
    assert second * (1 + term.error) == pytest.approx(first)
    assert first * (1 + term.change) == pytest.approx(second)


@pytest.mark.parametrize(("first", "second"), [(None, 1.0), (1.0, None), (None, None)])
def test_what_is_not_known_is_not_compared(first: float | None, second: float | None) -> None:
    term = Term("peak", "bytes", first, second)
    assert (term.error, term.change) == (None, None)
    assert [text == "" for text in term.texts()] == [first is None, second is None]


def test_nothing_has_no_share() -> None:
    assert Term("calls", "calls", 0, 3).change is None
    assert Term("calls", "calls", 3, 0).error is None
    assert Term("calls", "calls", 0, 0).error == 0.0


def test_a_screen_may_write_a_unit_in_its_own_way() -> None:
    term = Term("step", "ns", 2e6, 3e6)
    assert term.texts({"ns": lambda time: f"{time / 1e6:.0f}"}) == ("2", "3")


def test_collectives_of_one_side_are_compared_with_none() -> None:
    names = {"all-gather": "all-gather", "all-reduce": "all-reduce"}
    terms = traffic_terms({"all-gather": (4, 100)}, {"all-reduce": (1, None)}, names)
    assert [term[2:] for pair in terms.values() for term in pair] == [
        (4, 0), (100, 0), (0, 1), (0, None)
    ]  # fmt: skip
