"""Tables: one description, and CSV, Markdown and terminal that agree with it."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.report.screen import terminal_table
from shardwise.report.table import Cell, Column, Table, csv_text, markdown_text
from tests.tables import markdown_rows

COLUMNS = (
    Column("name", "name", left=True),
    Column("step_s", "step", lambda seconds: f"{seconds:.2f} s"),
    Column("fits", "fits", lambda fits: "yes" if fits else "no", on_screen=False),
)
# Names that are shown as they are.
TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"]), max_size=12
).filter(lambda name: name.lstrip()[:1] not in tuple("=+-@"))
ROWS = st.lists(
    st.tuples(TEXTS, st.none() | st.floats(0, 1e6), st.none() | st.booleans()), max_size=5
)


@given(ROWS)
def test_csv_holds_the_raw_values(rows: list[tuple[str, float | None, bool | None]]) -> None:
    table = Table(COLUMNS)
    for row in rows:
        table.add(*row)
    read = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert len(read) == len(rows)
    for found, (name, step_s, fits) in zip(read, rows, strict=True):
        assert found["name"] == name
        assert (float(found["step_s"]) if found["step_s"] else None) == step_s
        assert {"": None, "true": True, "false": False}[found["fits"]] is fits


@given(ROWS)
def test_markdown_has_a_cell_per_column_whatever_a_name_contains(
    rows: list[tuple[str, float | None, bool | None]],
) -> None:
    table = Table(COLUMNS)
    for row in rows:
        table.add(*row)
    read = markdown_rows(markdown_text(table))
    assert len(read) == len(rows)
    for found, (name, step_s, _) in zip(read, rows, strict=True):
        assert found["name"] == " ".join(name.splitlines()).strip()
        assert found["step"] == ("" if step_s is None else f"{step_s:.2f} s")


def test_a_cell_with_a_text_has_no_value_in_the_csv() -> None:
    table = Table(COLUMNS)
    table.add("zero3", Cell(None, "does not fit"))
    assert csv_text(table) == "name,step_s,fits\nzero3,,\n"
    assert markdown_rows(markdown_text(table))[0]["step"] == "does not fit"


def test_the_terminal_leaves_out_what_has_no_room() -> None:
    table = Table(COLUMNS)
    table.add("zero3", 1.5, True, strong=True)
    written = terminal_table(table)
    assert [column.header for column in written.columns] == ["name", "step"]
    assert [str(cell) for column in written.columns for cell in column.cells] == ["zero3", "1.50 s"]
    assert written.rows[0].style == "bold"


def test_markdown_aligns_numbers_to_the_right() -> None:
    head, rule, *_ = markdown_text(Table(COLUMNS)).splitlines()
    assert head == "| name | step | fits |"
    assert re.findall(r"[:-]+", rule) == [":--", "--:", "--:"]


def test_more_cells_than_columns_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="4 cells for 3 columns"):
        Table(COLUMNS).add("a", 1.0, True, "more")
