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


def _figures(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?%?", text.replace(" %", "%")))


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
@pytest.mark.parametrize(
    ("bullet", "row", "figures"),
    [
        ("Time of a stack that nobody has measured", "Tokens per second, new stack", (1, 2)),
        ("Time on unseen projects", "Tokens per second, unseen project", (0, 1, 2)),
        ("Time with one measured step of yours", "Tokens per second, one step measured", (0, 2)),
        ("Memory on GPUs", "Memory on GPUs", (0, 1, 3, 4, 5)),
    ],
)
def test_the_front_pages_repeat_the_figures(
    name: str, bullet: str, row: str, figures: tuple[int, ...]
) -> None:
    """The figures of a bullet, by their place in it, in a row of the front page's table."""
    (told,) = re.findall(rf"^- \*\*{bullet}\*\*.*$", PAGE, re.MULTILINE)
    numbers = re.findall(r"\d+(?:\.\d+)?%?", told)
    (shown,) = re.findall(
        rf"^\| {row} \|.*$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {numbers[number] for number in figures} <= _figures(shown)
