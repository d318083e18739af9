"""Text of a run in YAML and in names stays what it was."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.stacks.write.quoting import slug, yaml_block, yaml_text
from tests.stacks.runs import HOSTILE

yaml = pytest.importorskip("yaml")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
@example(HOSTILE)
def test_a_quoted_text_reads_back(text: str) -> None:
    assert yaml.safe_load(f"key: {yaml_text(text)}\nnext: 1") == {"key": text, "next": 1}


@given(TEXT)
@example(HOSTILE)
@example("a\n  b\n\nc\n")
@example(" first\n")
def test_a_block_reads_back(text: str) -> None:
    found = yaml.safe_load(f"key:\n  inner: {yaml_block(text, 4)}\nnext: 1")
    assert found == {"key": {"inner": text}, "next": 1}


def test_lines_stay_lines_where_they_can() -> None:
    assert yaml_block("a = 1\n\nb = 2\n", 2) == "|\n  a = 1\n\n  b = 2"


@given(TEXT)
@example(HOSTILE)
@example("")
@example("123")
def test_a_name_is_one_of_dns(text: str) -> None:
    """RFC 1035: what services must be called; an index of four digits is still to come."""
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,56}[a-z0-9])?", slug(text))
