"""One capacity on a screen, one limit, and bars that end at the figure of the sentence."""

from __future__ import annotations

import json
import re

import pytest

from shardwise.report.bars import FILLS, MIN_SHARE
from shardwise.web.answer import answer
from tests.command import shardwise

MEMORY = re.compile(r"([\d.]+) GiB of ([\d.]+) GiB \(usable ([\d.]+) GiB")
LIMIT = re.compile(r"(?:needs ([\d.]+) GiB, )([\d.]+) GiB usable")
PART = re.compile(rf"[{FILLS}] [a-z][a-z ]+ ([\d.]+)")

MODEL = ("--model", "llama-3-8b", "--cluster")
SCREENS = {
    "fits": ("plan", *MODEL, "2x8xH100-SXM@400Gbps"),
    "does not fit": ("plan", *MODEL, "8xRTX-4090"),
    "at risk": ("estimate", *MODEL, "8xH100-SXM", "--seq-len", "8192", "--strategy", "zero3"),
}


@pytest.mark.parametrize("words", SCREENS.values(), ids=SCREENS)
def test_a_screen_has_one_capacity_and_its_bar_ends_at_the_figure(words: tuple[str, ...]) -> None:
    printed = shardwise(*words).stdout
    ((needed, capacity, usable),) = MEMORY.findall(printed)
    assert float(usable) < float(capacity)
    # Every limit that something is compared with is this one.
    assert {limit for _, limit in LIMIT.findall(printed)} == {usable}
    legend = printed.partition("(usable")[2].partition("\n\n")[0]
    total = sum(float(part) for part in PART.findall(legend))
    assert total == pytest.approx(float(needed), rel=MIN_SHARE, abs=0.3)


def test_a_page_has_one_capacity_and_its_bar_ends_at_the_figure() -> None:
    asked = {"ask": "plan", "model": "llama-3-8b", "cluster": "8xH100-SXM"}
    html = json.loads(answer(json.dumps(asked)))["html"]
    shown = "".join(html[name] for name in ("about", "verdict", "tiles", "memory", "why"))
    text = re.sub("<[^>]*>", " ", shown).replace("\N{NO-BREAK SPACE}", " ")
    ((needed, capacity, usable),) = set(MEMORY.findall(text))
    assert float(usable) < float(capacity)
    assert {limit for _, limit in LIMIT.findall(text)} == {usable}
    assert f"usable {usable} GiB" in text
    # Once each in the verdict, the tile and beside the bar, and in the sentence below it.
    assert len(re.findall(rf"(?<![\d.]){re.escape(needed)} GiB", text)) >= 4
