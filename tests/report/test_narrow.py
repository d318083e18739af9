"""The page on a phone: 390 pixels wide, as a browser lays it out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardwise.report.page.bars import badge
from shardwise.report.page.markup import Markup, element, table
from shardwise.report.page.style import page_style
from tests.command import PATIENCE_S

WIDTH = 390
# Of every table: how wide its box is, how wide its content, and how many shadows the box has.
SCRIPT = """
document.title = JSON.stringify([...document.querySelectorAll(".scroll")].map((box) => ({
  box: box.clientWidth, content: box.scrollWidth,
  headings: [...box.querySelectorAll("thead th")].map((cell) => cell.getBoundingClientRect().right),
  shadows: getComputedStyle(box).backgroundImage.split("linear-gradient").length - 1,
})));
"""
TERMS = [
    ["all-gather, groups of 16: bytes", "30.02 GB", "30.02 GB", "exact"],
    ["activations, logits, new gradients", "1,045.66 MiB", "1,045.70 MiB", "-0.1%"],
    ["10th and 90th percentile", "", "600.0 ms, 700.0 ms", ""],
]


def laid_out(content: Markup, folder: Path) -> list[dict[str, Any]]:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here")
    body = element("div", element("section", content), style=f"width:{WIDTH - 29}px")
    file = folder / "page.html"
    file.write_text(
        f"<!doctype html><style>{page_style()}</style><body>{body}<script>{SCRIPT}</script>"
    )
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={folder / 'browser'}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None
    found: list[dict[str, Any]] = json.loads(title[1])
    return found


@pytest.mark.slow
def test_predicted_and_measured_fit_side_by_side(tmp_path: Path) -> None:
    head = ["", badge("predicted"), badge("measured"), "error"]
    (found,) = laid_out(table(head, TERMS), tmp_path)
    assert found["content"] <= found["box"] <= WIDTH
    assert max(found["headings"]) <= WIDTH


@pytest.mark.slow
def test_a_wider_table_hints_that_it_scrolls(tmp_path: Path) -> None:
    columns = [f"column {number}" for number in range(12)]
    (found,) = laid_out(table(["name", *columns], [["row", *columns]]), tmp_path)
    assert found["content"] > found["box"]
    # A shadow at each edge, and paper that hides it where the table ends.
    assert found["shadows"] == 4
