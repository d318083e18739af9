"""Tables: typed cells under named columns, written for a terminal, as CSV or as Markdown.

Every screen that shows a table describes it once as a `Table`. Whoever reads the CSV gets the raw
numbers of `--json`; whoever reads the terminal or the Markdown gets them as text.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardwise.spec.foreign_text import csv_cell, one_line
from shardwise.step.words import COLOURS, error_words

Value = str | int | float | bool | None


class Column(NamedTuple):
    """One column: `key` heads the CSV and names the unit (`step_s`), `title` heads the rest."""

    key: str
    title: str
    # Text of a value that is not None.
    show: Callable[[Any], str] = str
    left: bool = False
    # Whether 80 columns have room for it; CSV and Markdown always have.
    on_screen: bool = True
    # Whether a long text may take several lines of a terminal.
    wrap: bool = False


class Cell(NamedTuple):
    """A value; with a `text` of its own where the column's `show` does not say it best."""

    value: Value
    text: str | None = None
    style: str = ""


ERROR = Column("error", "error", lambda error: error_words(error)[0])


def error_cell(error: float | None) -> Cell:
    """A relative prediction error for the column `ERROR`, coloured by its size."""
    return Cell(error, style="" if error is None else COLOURS[error_words(error)[1]])


class Row(NamedTuple):
    """A cell per column; the row that was chosen is strong."""

    cells: tuple[Cell, ...]
    strong: bool = False


class Table:
    """Columns and the rows added so far."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self.rows: list[Row] = []

    def add(self, *cells: Value | Cell, strong: bool = False) -> None:
        """Append a row; cells that are left out at its end are empty."""
        if len(cells) > len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        padded = [*cells, *[None] * (len(self.columns) - len(cells))]
        typed = tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in padded)
        self.rows.append(Row(typed, strong))

    def texts(self, row: Row) -> list[str]:
        """What people read in the cells of a row."""
        return [
            cell.text
            if cell.text is not None
            else ""
            if cell.value is None
            else column.show(cell.value)
            for column, cell in zip(self.columns, row.cells, strict=True)
        ]


def csv_text(table: Table) -> str:
    """As CSV: raw numbers, `true` and `false`, nothing where a value is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(column.key) for column in table.columns])
    for row in table.rows:
        writer.writerow([_raw(cell.value) for cell in row.cells])
    return text.getvalue()


def _raw(value: Value) -> Value:
    if isinstance(value, str):
        return csv_cell(value)
    return str(value).lower() if isinstance(value, bool) else value


def markdown_text(table: Table) -> str:
    """As a table of GitHub's Markdown, with every column."""
    lines = [
        _markdown_row([_escaped(column.title) for column in table.columns]),
        _markdown_row([":--" if column.left else "--:" for column in table.columns]),
        *(_markdown_row([_escaped(text) for text in table.texts(row)]) for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Names come from files: none starts a cell, a link, a tag or code, or ends the table."""
    return re.sub(r"[\\|<\[`]", r"\\\g<0>", one_line(text))
