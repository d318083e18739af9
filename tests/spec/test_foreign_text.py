"""Text of others is shown as text: nothing that a terminal, an editor or a file would obey."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.spec.foreign_text import one_line, visible

# Any text, and file names whose bytes are not UTF-8, which Python keeps as lone surrogates.
TEXT = st.text(st.characters(exclude_categories=[]))
HOSTILE = "a\x1b]0;title\x07\x9b31m\u202eb\u2066c\u200bd\u2028e\x85f\r\ng\x00\udcff"


@given(TEXT)
@example(HOSTILE)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    for one in set(shown) - {"\n", "\t"}:
        assert unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    assert len(f"# {one_line(text)}".splitlines()) == 1
    shown.encode()


@pytest.mark.parametrize("text", ["naïve – 模型 🤗", "a\u00a0b\u202fc\u3000d", "line\n\tline", ""])
def test_what_people_write_stays(text: str) -> None:
    assert visible(text) == text
