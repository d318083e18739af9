"""Published figures beside predictions: all have a source, and larger errors a reason."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.literature.__main__ import PAGE, report, summary
from benchmarks.literature.rows import NEAR, Row, predict, read_rows, read_sources
from shardwise.predict import closed_form
from tests.command import COMMAND, ROOT, environment


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows()


def test_at_least_sixty_figures_are_predicted(rows: list[Row]) -> None:
    assert summary(rows)["predicted"] >= 60
    # Most of them not by arithmetic alone.
    assert summary(row for row in rows if row.basis == "measured")["predicted"] >= 60


def test_every_figure_stands_somewhere(rows: list[Row]) -> None:
    sources = read_sources()
    assert {row.source for row in rows} == {source.key for source in sources}
    for source in sources:
        assert source.url.startswith("https://")
        assert source.read
    for row in rows:
        assert row.where, row.what
        assert row.unit, row.what
    told = [(row.source, row.where, row.what, row.unit) for row in rows]
    assert len(set(told)) == len(told)


def test_what_is_far_off_or_not_predicted_has_a_reason(rows: list[Row]) -> None:
    for row in rows:
        far = row.error is not None and abs(row.error) > NEAR
        differs = row.error is None and row.predicted != row.published
        assert row.why or not (far or differs), row


def test_the_report_of_two_h100_is_replayed_whole(rows: list[Row]) -> None:
    """Its headline figures, as they are printed."""
    published = {row.published for row in rows if row.source == "report"}
    assert {112.3, 58.3, 58.8, 58.6, 32582.0, 109.0, 73.0, 37.0, 58438.0, 97.71} <= published


def test_a_formula_is_the_one_of_the_paper() -> None:
    """ZeRO, section 5: 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes."""
    for stage, whole, divided in ((1, 4, 12), (2, 2, 14), (3, 0, 16)):
        found = predict("states", f"parameters=3e9 devices=7 stage={stage}")
        assert found == pytest.approx(3 * (whole + divided / 7))


# ---- citations ------------------------------------------------------------------------------


FORMULAS = [
    function
    for _, function in inspect.getmembers(closed_form, inspect.isfunction)
    if function.__module__ == closed_form.__name__ and not function.__name__.startswith("_")
]
# What kernels.md says stands on published measurements, which `catalog kernels --json` names.
PAGES = sorted(set((ROOT / "docs" / "concepts").glob("*.md")) - {ROOT / "docs/concepts/kernels.md"})


@pytest.mark.parametrize("function", FORMULAS, ids=lambda function: function.__name__)
def test_every_formula_names_its_source(function: object) -> None:
    """By a name that the head of the module spells out."""
    head = inspect.getdoc(closed_form) or ""
    names = re.findall(r"^- (\w+): .*arXiv \d{4}\.\d{5}", head, re.MULTILINE)
    assert len(names) == 4
    assert any(re.search(rf"\b{name}\b", inspect.getdoc(function) or "") for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_concept_names_its_sources(page: Path) -> None:
    """A paper that the literature page replays, and where in it."""
    told = page.read_text(encoding="utf-8").partition("\n## Sources\n")[2]
    papers = {source.url for source in read_sources()}
    cited = re.findall(r"\]\((https://arxiv[^)]*)\)(.*)", told)
    assert cited
    for address, where in cited:
        assert address in papers
        assert re.search("section|appendix|abstract|reconstructed", where), where
    assert "../literature.md" in told


# ---- page -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_commands_are_read_as_the_command_line_reads_them(rows: list[Row]) -> None:
    for row in rows:
        words = row.how.partition(" of shardwise ")[2].partition(" | ")[0].split()
        if not row.how.startswith(("20 * step_s", "step_s", "teraflops", "mfu", "verdict")):
            continue
        done = subprocess.run(
            [*COMMAND, *words, "--json"],
            capture_output=True, text=True, cwd=ROOT, env=environment(), check=False,
        )  # fmt: skip
        found = json.loads(done.stdout)
        if row.how.startswith("20 * step_s"):
            assert 20 * found["time"]["step_s"] == pytest.approx(row.predicted)
        elif row.how.startswith("verdict"):
            assert found["memory"]["verdict"] == row.predicted
        elif row.how.startswith("mfu"):
            assert 100 * found["throughput"]["mfu"] == pytest.approx(row.predicted)


@pytest.mark.nightly
def test_the_page_is_what_the_command_prints(rows: list[Row]) -> None:
    assert PAGE.read_text(encoding="utf-8") == report(rows, read_sources())
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.literature"],
        capture_output=True, text=True, cwd=ROOT, env=environment(), check=True,
    )  # fmt: skip
    assert done.stdout.rstrip("\n") == PAGE.read_text(encoding="utf-8").rstrip("\n")
