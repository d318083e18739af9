"""Readers of printed tables, written for tests."""

from __future__ import annotations

import csv
import io
import re


def csv_rows(text: str) -> list[dict[str, str]]:
    """The rows of a CSV by their header."""
    return list(csv.DictReader(io.StringIO(text)))


def markdown_rows(text: str) -> list[dict[str, str]]:
    """The rows of one Markdown table by their header, read as GitHub reads them."""
    head, rule, *rows = [_cells(line) for line in text.splitlines()]
    assert len(rule) == len(head)
    assert all(re.fullmatch(r":?-+:?", cell) for cell in rule)
    return [dict(zip(head, row, strict=True)) for row in rows]


def _cells(line: str) -> list[str]:
    """The cells of a row: a backslash escapes the character after it."""
    cells, escaped = [""], False
    for character in line.strip()[1:-1]:
        if escaped or character not in "\\|":
            cells[-1] += character
            escaped = False
        elif character == "\\":
            escaped = True
        else:
            cells.append("")
    return [cell.strip() for cell in cells]
