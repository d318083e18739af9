"""`shardwise report`: one HTML page about plans, runs and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import check_output
from shardwise.spec.foreign_text import echo


def report(
    subjects: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, run.toml files, traces, folders of these, or output of --json."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about plans, runs and traces: verdict, memory, time, timeline, what-ifs.

    The page opens from disk and needs no network. Several arguments are compared.
    """
    import shlex

    from shardwise.report.page.page import write_page
    from shardwise.report.page.read import read_subjects

    check_output(output, suffix=".html")
    found = read_subjects(subjects)
    words = ["shardwise", "report", *map(str, subjects), "-o", str(output)]
    page = write_page(found, shlex.join(words))
    output.write_text(page, encoding="utf-8")
    echo(f"Written to {output} ({len(page.encode()) / 1e6:.2f} MB); open it in a browser.")
