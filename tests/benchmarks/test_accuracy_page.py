"""The head of docs/accuracy.md, which README and the first page of the documentation repeat."""

from __future__ import annotations

import re

import pytest

from benchmarks.accuracy import project
from benchmarks.validation import read_rows
from tests.command import ROOT

PAGE = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")


def test_two_pages_of_a_repository_are_one_project() -> None:
    assert project("mosaicml/llm-foundry README [A100]") == project("mosaicml/llm-foundry PR 5")
    assert project("AWS ML blog: torchtitan on SageMaker") != project("AWS blog: FSDP")


def test_rows_of_unseen_projects_share_no_project_with_fitted_ones() -> None:
    fitted = {project(row.source) for row in read_rows(("fit",))[0]}
    unseen = [row for row in read_rows(("heldout",))[0] if project(row.source) not in fitted]
    assert f"{len(unseen)} held-out rows are of projects without a fitted row" in PAGE


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_front_pages_repeat_the_figures(name: str) -> None:
    """Rows, median and mean of unseen projects; rows and median of memory; adapters' largest."""
    time, memory = re.findall(r"^- \*\*.*$", PAGE, re.MULTILINE)[:2]
    text = (ROOT / name).read_text(encoding="utf-8").replace(" %", "%")
    for line, start, figures in (
        (time, "| Tokens per second |", (0, 1, 2)),
        (memory, "| Memory on GPUs |", (0, 1, 3, 4, 5)),
    ):
        told = re.findall(r"\d+(?:\.\d+)?%?", line)
        row = next(one for one in text.splitlines() if one.startswith(start))
        assert {told[number] for number in figures} <= set(re.findall(r"\d+(?:\.\d+)?%?", row))
