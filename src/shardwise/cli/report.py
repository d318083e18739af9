"""`shardwise report`: one page that shows it all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import check_output


def report(
    subjects: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, run.toml files, traces, folders of either, or what --json printed."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write it.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about plans, runs and traces: verdict, memory, time, timeline, what-ifs.

    The page needs no network and opens from disk. Give several to compare them.
    """
    import shlex

    from shardwise.report.page.page import write_page
    from shardwise.report.page.read import read_subjects

    check_output(output, suffix=".html")
    found = read_subjects(subjects)
    words = ["shardwise", "report", *map(str, subjects), "-o", str(output)]
    page = write_page(found, shlex.join(words))
    output.write_text(page, encoding="utf-8")
    typer.echo(f"Written to {output} ({len(page.encode()) / 1e6:.2f} MB); open it in a browser.")
