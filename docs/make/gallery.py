"""Plans of common questions, made when the documentation is built; each opens in the planner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import NamedTuple
from urllib.parse import urlencode

from shardwise.report.page.style import cell_style
from shardwise.web.answer import answer

# Where the planner's page is, seen from the page of the gallery.
PLANNER = "../planner/"


class Example(NamedTuple):
    """A question, by the names of the planner's form; what it leaves out is the form's default."""

    title: str
    form: Mapping[str, str]

    @property
    def question(self) -> dict[str, object]:
        form = {"nodes": "1", "per-node": "8", "network": "400", "rank": "16", **self.form}
        wire = f"@{form['network']}Gbps" if form["nodes"] != "1" else ""
        asked: dict[str, object] = {"ask": "plan", "model": form["model"]}
        asked["cluster"] = f"{form['nodes']}x{form['per-node']}x{form['device']}{wire}"
        if "adapter" in form:
            asked["adapter"] = f"{form['adapter']}:{form['rank']}"
        same = ("seq-len", "global-batch", "tokens", "price")
        return asked | {name.replace("-", "_"): form[name] for name in same if name in form}

    @property
    def address(self) -> str:
        return f"{PLANNER}#{urlencode(self.form)}"


H100 = {"device": "H100-SXM"}
EXAMPLES = (
    Example(
        "Fine-tune 8B on one gaming card",
        {"model": "llama-3.1-8b", "adapter": "qlora", "device": "RTX-4090", "per-node": "1",
         "seq-len": "4096"},
    ),
    Example(
        "Fine-tune 70B on four A100",
        {"model": "llama-3.1-70b", "adapter": "qlora", "device": "A100-80GB", "per-node": "4",
         "seq-len": "8192"},
    ),
    Example("Train all of 8B on one node", {"model": "llama-3-8b", **H100}),
    Example(
        "128k tokens of context on one node",
        {"model": "llama-3.1-8b", **H100, "seq-len": "131072"},
    ),
    Example(
        "Pretrain 8B on a slow network",
        {"model": "llama-3-8b", "device": "A100-80GB", "nodes": "8", "network": "50",
         "global-batch": "4Mi"},
    ),
    Example(
        "70B on 64 GPUs", {"model": "llama-3-70b", **H100, "nodes": "8", "global-batch": "4Mi"}
    ),
    Example(
        "Experts: 30B with 3B active",
        {"model": "qwen3-30b-a3b", "device": "H200-SXM", "nodes": "4", "global-batch": "4Mi"},
    ),
    Example(
        "15 trillion tokens through 405B",
        {"model": "llama-3.1-405b", **H100, "nodes": "256", "global-batch": "16Mi",
         "tokens": "15T", "price": "2.50"},
    ),
)  # fmt: skip


def gallery() -> str:
    """A card for each example."""
    cards = "".join(_card(example) for example in EXAMPLES)
    return f"<style>{cell_style()}</style>\n<div class='gallery'>{cards}</div>"


def _card(example: Example) -> str:
    found = json.loads(answer(json.dumps(example.question)))
    assert not found["problems"], (example.title, found["problems"])
    html = found["html"]
    # Details are what the planner is for.
    bars = html["memory"].partition("<details>")[0]
    pieces = html["verdict"] + html.get("cost", "") + html["tiles"] + bars
    return (
        f"<section class='shardwise'><h2>{escape(example.title)}</h2>"
        f"<pre><code>{escape(found['command'])}</code></pre>{pieces}"
        f"<p><a href='{escape(example.address)}'>Open it in the planner</a></p></section>"
    )
