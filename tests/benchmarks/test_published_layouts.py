"""Published layouts beside plans: the facts are consistent, and the page shows what is planned."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

import pytest

from benchmarks import published_layouts as published
from benchmarks.published_layouts import Published

RUNS = published.read_runs()
by_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)


@by_run
def test_published_degrees_multiply_to_the_devices(run: Published) -> None:
    # Experts are divided among devices that see different data.
    degrees = (run.tensor, run.context, run.pipeline, run.data)
    assert math.prod(degrees) == run.devices
    assert run.data % run.expert == 0


@by_run
def test_every_run_has_a_source_and_a_reason(run: Published) -> None:
    assert urlsplit(run.url).scheme == "https"
    assert run.source
    assert run.why.endswith(".")


@by_run
def test_the_page_states_the_facts(run: Published) -> None:
    page = published.PAGE.read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [{run.name}](")]
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert cells[1] == published.published_layout(run)
    assert cells[-1] == run.why


def test_two_sequences_per_device_need_no_division() -> None:
    (run,) = (one for one in RUNS if one.name == "Llama 3 70B, NeMo AutoModel")
    found = published.answer(run)
    assert found.chosen is not None
    assert not found.chosen.layout.is_divided
    assert found.published is not None


@pytest.mark.nightly
def test_the_page_shows_what_is_planned() -> None:
    page = published.PAGE.read_text(encoding="utf-8")
    (section,) = published.SECTION.findall(page)
    assert section == published.table()
