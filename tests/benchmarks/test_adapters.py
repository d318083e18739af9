"""The section on adapters in docs/accuracy.md is what its command prints."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from benchmarks import adapters


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The study without the figures whose model is traced."""
    return adapters.study(traced=False)


def test_lines_of_the_docs_are_what_the_command_prints(result: dict[str, Any]) -> None:
    page = adapters.PAGE.read_text(encoding="utf-8").splitlines()
    lines = adapters.section(result)
    start = lines.index("### Memory of adapters, figure by figure")
    # Medians above that line are of all figures.
    assert set(lines[start:]) | set(adapters.TEXT) <= set(page)
    named = {line.split(" | ")[0] for line in page}
    assert {f"| {name}" for name in _named()} <= named


def _named() -> list[str]:
    with adapters.FIGURES.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["id"] for row in rows if not row["not_predicted"]]


@pytest.mark.nightly
def test_the_section_of_the_docs_is_what_the_command_prints() -> None:
    pytest.importorskip("transformers")
    page = adapters.PAGE.read_text(encoding="utf-8")
    assert "\n".join(adapters.section(adapters.study())) in page


def test_every_error_above_ten_percent_has_a_reason(result: dict[str, Any]) -> None:
    for row in result["figures"]:
        if row["error"] is None or abs(row["error"]) > adapters.NEAR:
            assert row["why"], row["id"]
