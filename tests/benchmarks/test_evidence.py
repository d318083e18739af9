"""The table of what stacks ran with: complete, sourced, and of nothing but them."""

from __future__ import annotations

import csv
import re

from benchmarks.validation import FOLDER

COLUMNS = ["stack", "rows", "setting", "value", "certainty", "repository", "commit", "path",
           "lines", "what_it_says"]  # fmt: skip
ASKED = {"attention", "recompute", "head_and_loss", "compile", "gradient_dtype"}


def _rows() -> list[dict[str, str]]:
    with (FOLDER / "evidence.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return list(reader)


def test_every_stack_answers_every_question() -> None:
    """Unknown is an answer."""
    told: dict[str, set[str]] = {}
    for row in _rows():
        assert row["value"]
        assert row["certainty"] in ("read", "documented", "inferred", "unknown"), row
        if not row["rows"].startswith("(rule"):
            told.setdefault(row["stack"], set()).add(row["setting"])
    assert len(told) >= 90
    incomplete = {stack: ASKED - found for stack, found in told.items() if ASKED - found}
    assert not incomplete


def test_what_was_read_says_where() -> None:
    for row in _rows():
        if row["certainty"] == "read":
            assert row["repository"], row
            assert row["path"], row
            assert re.fullmatch(r"[0-9a-f]{7,40}|", row["commit"]), row
        text = " ".join(row.values())
        assert not re.search(r"https?://|/work/|/tmp/", text), row
