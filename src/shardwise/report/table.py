"""Tables: typed cells under named columns, written for a terminal, as CSV or as Markdown.

Each screen describes a table once, as a `Table`. CSV has the raw numbers of `--json`; the terminal
and Markdown have text.
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
    """A column: `key` is its CSV header and names the unit (`step_s`), `title` its other header."""

    key: str
    title: str
    # Text of a value that is not None.
    show: Callable[[Any], str] = str
    left: bool = False
    # Whether a terminal shows the column; CSV and Markdown always have it.
    on_screen: bool = True
    # Whether a long text may take several lines of a terminal.
    wrap: bool = False


class Cell(NamedTuple):
    """A value; `text`, if given, replaces what the column's `show` writes."""

    value: Value
    text: str | None = None
    style: str = ""


ERROR = Column("error", "error", lambda error: error_words(error)[0])


def error_cell(error: float | None) -> Cell:
    """A relative prediction error for the column `ERROR`, coloured by its size."""
    return Cell(error, style="" if error is None else COLOURS[error_words(error)[1]])


class Row(NamedTuple):
    """One cell per column; a `strong` row is printed in bold."""

    cells: tuple[Cell, ...]
    strong: bool = False


class Table:
    """Columns and the rows added so far."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self.rows: list[Row] = []

    def add(self, *cells: Value | Cell, strong: bool = False) -> None:
        """Append a row; missing cells at its end are empty."""
        if len(cells) > len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        padded = [*cells, *[None] * (len(self.columns) - len(cells))]
        typed = tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in padded)
        self.rows.append(Row(typed, strong))

    def texts(self, row: Row) -> list[str]:
        """The text of each cell of a row; empty for None."""
        return [
            cell.text
            if cell.text is not None
            else ""
            if cell.value is None
            else column.show(cell.value)
            for column, cell in zip(self.columns, row.cells, strict=True)
        ]


def csv_text(table: Table) -> str:
    """The table as CSV: raw numbers, `true` and `false`, empty for None."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(column.key) for column in table.columns])
    for row in table.rows:
        writer.writerow([_raw(cell.value) for cell in row.cells])
    return text.getvalue()


def _raw(value: Value) -> Value:
    """A value as CSV writes it; text that a spreadsheet would compute gets an apostrophe."""
    if isinstance(value, str):
        return csv_cell(value)
    return str(value).lower() if isinstance(value, bool) else value


def markdown_text(table: Table) -> str:
    """The table as GitHub Markdown, with every column."""
    lines = [
        _markdown_row([_escaped(column.title) for column in table.columns]),
        _markdown_row([":--" if column.left else "--:" for column in table.columns]),
        *(_markdown_row([_escaped(text) for text in table.texts(row)]) for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text escaped for a cell of a Markdown table.

    Names come from files: none may start a cell, a link, a tag or code, or end the table.
    """
    return re.sub(r"[\\|<\[`]", r"\\\g<0>", one_line(text))
