"""Measured sections of pages: a table, and the place in a page that it replaces."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_section(page: Path, name: str) -> str:
    return _split(page, name)[1]


def write_section(page: Path, name: str, table: str) -> None:
    """Replace the text between `<!-- measured: NAME -->` and `<!-- end -->`."""
    before, _, after = _split(page, name)
    page.write_text(f"{before}\n{table}\n{after}")


def _split(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- measured: {name} -->\n", "<!-- end -->"
    before, found, rest = page.read_text().partition(begin)
    section, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{page.name} has no `{begin.strip()}` section")
    return before + begin, section, closed + after
