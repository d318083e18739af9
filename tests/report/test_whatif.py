"""Words of differences: nothing that reads as no change, whatever the figures."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.difference import Difference
from shardwise.report.whatif import difference_words
from shardwise.spec.strategy import Strategy

SHARES = st.floats(0, 1)


@given(
    speed=st.floats(0.01, 100),
    mfu=st.floats(-0.5, 0.5),
    exposed=st.none() | st.tuples(SHARES, SHARES),
    peak=st.none() | st.floats(0.01, 50),
)
def test_no_change_is_never_worded_as_one(
    speed: float, mfu: float, exposed: tuple[float, float] | None, peak: float | None
) -> None:
    strategy = Strategy(kind="zero3").resolve(8, 8)
    change = Difference(speed, mfu, (strategy, strategy), exposed=exposed, peak=peak)
    words = difference_words(change)
    for before, after in re.findall(r"(\S+) → (\S+)", words):
        assert before != after
    assert not re.search(r"[+-]0(\.0+)?(%|\b)(?!\.)", words)
    assert " 1.0x" not in words
    (points,) = re.findall(r"MFU (\S+) points", words)
    assert abs(float(points) - 100 * mfu) <= 0.051
    assert words.endswith(".")
