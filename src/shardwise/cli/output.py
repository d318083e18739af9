"""The output formats of commands: `--json`, `--csv`, `--markdown`, and files they write."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.spec.foreign_text import echo
from shardwise.spec.record import SpecError

if TYPE_CHECKING:
    from shardwise.report.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CsvOption = Annotated[
    bool, typer.Option("--csv", help="Print the table as CSV: raw numbers, units in the header.")
]
MarkdownOption = Annotated[
    bool, typer.Option("--markdown", help="Print the table as GitHub Markdown.")
]


class Format(StrEnum):
    """What a command prints."""

    screen = "screen"
    json = "json"
    csv = "csv"
    markdown = "markdown"


def output_format(as_json: bool, as_csv: bool, as_markdown: bool) -> Format:
    """The requested output format; the screen if none is given, SpecError for several."""
    chosen = {Format.json: as_json, Format.csv: as_csv, Format.markdown: as_markdown}
    asked = [name for name, wanted in chosen.items() if wanted]
    if len(asked) > 1:
        given = " and ".join(f"--{name}" for name in asked)
        raise SpecError(f"output: {given} exclude each other; give one of them")
    return asked[0] if asked else Format.screen


def print_json(value: object) -> None:
    """Print strict JSON: NaN and infinity raise, they are never printed."""
    import json

    echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(table: Table, form: Format) -> None:
    """Print a table as CSV or as Markdown."""
    from shardwise.report.table import csv_text, markdown_text

    echo(csv_text(table) if form is Format.csv else markdown_text(table), end="")


def check_output(path: Path, suffix: str) -> None:
    """Raise SpecError if a file cannot be written or would replace one of another type.

    `suffix` is the type to write, such as ".toml".
    """
    if path.name == "-":
        raise SpecError("output: '-' is not a file name; give a path")
    if not path.parent.is_dir():
        raise SpecError(f"output: folder {path.parent} does not exist; create it first")
    if path.is_dir() or (path.exists() and path.suffix != suffix):
        raise SpecError(f"output: {path} exists and is not a {suffix} file; give another path")
