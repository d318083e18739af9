"""Plans, profiles and comparisons as a Jupyter kernel shows them."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import shardwise
from shardwise.spec.quantity import show_seconds
from shardwise.step.profile import Provenance, TimeProfile
from tests.command import PATIENCE_S, environment

CELLS = (
    "import shardwise",
    "shardwise.plan('llama-3-8b', '8xH100-SXM')",
    "shardwise.estimate('llama-3-8b', '8xH100-SXM', 'zero3')",
    "kinds = ('zero2', 'zero3')\n"
    "profiles = [shardwise.estimate('llama-3-8b', '8xH100-SXM', kind) for kind in kinds]\n"
    "shardwise.compare(*profiles, names=kinds)",
)


class Bars(HTMLParser):
    """How many bars there are, and every class that is used."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.classes: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @property
    def count(self) -> int:
        return self.classes.count("bar")


def test_a_profile_has_a_bar_for_memory_and_one_for_time() -> None:
    profile = shardwise.estimate("llama-3-8b", "8xH100-SXM", "zero3")
    assert Bars(profile._repr_html_()).count == 2


def test_a_prediction_and_its_measurement_are_compared_term_by_term() -> None:
    predicted = shardwise.estimate("llama-3-8b", "8xH100-SXM", "zero3")
    assert predicted.time is not None
    measured = predicted._replace(
        provenance=Provenance("measured", "0.1.0", "a test"),
        time=TimeProfile(step_s=predicted.time.step_s * 1.25),
    )
    shown = shardwise.compare(predicted, measured)._repr_html_()
    # Memory and time of both, and the error of the step: 1 / 1.25 - 1.
    assert Bars(shown).count == 4
    assert f"{1 / 1.25 - 1:+.1%}" in shown


def test_a_plan_has_one_step_time() -> None:
    plan = shardwise.plan("gpt2", "4x8xH100-SXM@100Gbps", global_batch=32_768)
    assert plan.winner is not None
    assert plan.winner.strategy.blocks_per_unit > 1
    profile = plan.profile(plan.winner)
    assert profile.time is not None
    assert profile.time.step_s == pytest.approx(plan.winner.step_s)
    assert profile.known_memory.needed_bytes == pytest.approx(plan.winner.needed_bytes)
    assert plan._repr_html_().count(show_seconds(plan.winner.step_s)) >= 3


def test_a_plan_without_a_winner_still_displays() -> None:
    plan = shardwise.plan("llama-3.1-405b", "1xH100-SXM")
    assert plan.winner is None
    assert Bars(plan._repr_html_()).classes.count("verdict") == 1


def test_styles_stay_inside_the_cell() -> None:
    """Every rule begins with the class of the cell, or lies inside such a rule."""
    shown = shardwise.estimate("gpt2", "8xH100-SXM")._repr_html_()
    style = shown.partition("<style>")[2].partition("</style>")[0]
    depth, begin, selectors = 0, 0, []
    for at, character in enumerate(style):
        if character == "{":
            if depth == 0:
                selectors.append(style[begin:at].strip())
            depth += 1
        elif character == "}":
            depth -= 1
            begin = at + 1 if depth == 0 else begin
    assert depth == 0
    for selector in selectors:
        alone = all(part.split()[-1] == ".shardwise" for part in selector.split(","))
        assert alone or selector == "@media (prefers-color-scheme: dark)", selector


@pytest.mark.nightly
def test_a_real_kernel_shows_html() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(code) for code in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, timeout=int(PATIENCE_S), kernel_name="python3")
    client.execute(env=environment())
    for cell, bars in zip(notebook.cells[1:], (2, 2, 4), strict=True):
        (output,) = cell.outputs
        assert output.output_type == "execute_result"
        assert Bars(output.data["text/html"]).count == bars
        # Terminals and logs get the short text.
        assert len(output.data["text/plain"]) < 600
