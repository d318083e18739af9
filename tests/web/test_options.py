"""What a sentence of the page tells to set, the page's form has."""

from __future__ import annotations

import re
from html import unescape
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

import pytest

from shardwise.planning.api import plan_run
from shardwise.report.page.subject import Subject
from shardwise.spec.optimizer import OPTIMIZERS
from shardwise.web.pieces import plan_pieces
from tests.gate import first_in_gate

BUTTON = re.compile(r'<button type="button" class="option" data-fields="([^"]*)">(.*?)</button>')
OPTION = re.compile(r"--[a-z][a-z-]+")
COMMAND = "shardwise estimate"


def choices() -> dict[str, set[str] | None]:
    """The fields of the form, and what each select offers; None for one that takes any text."""
    page = files("shardwise.web").joinpath("page", "index.html").read_text(encoding="utf-8")
    found: dict[str, set[str] | None] = dict.fromkeys(
        re.findall(r'<input [^>]*name="([^"]+)"', page)
    )
    for name, content in re.findall(
        r'<select [^>]*name="([^"]+)"[^>]*>(.*?)</select>', page, re.DOTALL
    ):
        options = re.findall(r"<option(?: value=\"([^\"]*)\")?>([^<]*)", content)
        found[name] = {value or text for value, text in options}
    # The page's script adds those of the catalogue.
    found["optimizer"] = set(OPTIMIZERS)
    return found


def sentences(**asked: Any) -> tuple[list[tuple[str, dict[str, str]]], list[str]]:
    """The options that set the form, with their fields; and the text beside them."""
    plan, chosen = plan_run(**asked, in_full=False)
    profile = plan.profile(plan.winner) if plan.winner else None
    pieces = plan_pieces(Subject(plan.problem.model.name, "", chosen, profile, plan=plan), None)
    html = pieces["verdict"] + pieces.get("why", "")
    buttons = [(text, dict(parse_qsl(unescape(data), keep_blank_values=True)))
               for data, text in BUTTON.findall(html)]  # fmt: skip
    return buttons, re.findall("<(?:p|li)>(.*?)</(?:p|li)>", BUTTON.sub("", html))


NODE = {"model": "llama-3-8b", "cluster": "8xRTX-4090"}
FEWER = {"model": "gpt2", "cluster": "12x8xH100-SXM@400Gbps", "seq_len": 1024}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    (NODE, {"adapter", "rank", "optimizer"}),
    ({"model": "llama-3-8b", "cluster": "8xH100-SXM"}, {"compile"}),
    ({**NODE, "for_stack": "trl"}, {"adapter", "rank"}),
    (
        {"model": "llama-3-8b", "cluster": "8x8xH100-SXM@100Gbps", "global_batch": "4Mi"},
        {"compile", "allow-low-precision-reduce"},
    ),
    ({**FEWER, "global_batch": 144 * 1024}, {"global-batch"}),
    ({**NODE, "optimizer": "adamw-8bit"}, {"compile"}),
    ({"model": "llama-3-70b", "cluster": "8xH100-SXM"}, {"adapter", "rank"}),
    ({"model": "mixtral-8x7b", "cluster": "8xA100-40GB"}, {"adapter", "rank"}),
]


@pytest.mark.parametrize(("asked", "fields"), first_in_gate(3, CASES))
def test_an_option_that_is_named_sets_fields_of_the_form(
    asked: dict[str, Any], fields: set[str]
) -> None:
    buttons, texts = sentences(**asked)
    offered = choices()
    assert {name for _, values in buttons for name in values} >= fields
    for option, values in buttons:
        for name, value in values.items():
            taken = offered[name]
            assert taken is None or not value or value in taken, option
    # What else is named belongs to a command, which is named too.
    title = next(
        (at for at, text in enumerate(texts) if f"options of '{COMMAND}'" in unescape(text)),
        len(texts),
    )
    assert not [text for text in texts[:title] if OPTION.search(text) and COMMAND not in text]
