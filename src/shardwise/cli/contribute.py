"""`shardwise contribute`: write what a run measured, beside its prediction, as one small file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, check_output


def contribute(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a finished run, or the file that accept wrote.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")] = Path(
        "contribution.json"
    ),
    yes: Annotated[bool, typer.Option("--yes", help="Write the file without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what a run measured, beside its prediction, as one small file. Nothing is sent.

    The file holds hardware, versions, layout, shapes, step time, memory and collectives: numbers,
    words of fixed lists and version numbers. No name, path, host, data or text of yours is in it.
    It is shown in full before it is written. --json shows it only. Exits with 1 if you decline.
    """
    import json

    from shardwise.contribution.collect import collect_all
    from shardwise.spec.record import SpecError

    check_output(output, ".json")
    files = {
        output.with_stem(f"{output.stem}-{name}") if name else output: one.to_dict()
        for name, one in collect_all(run).items()
    }
    records = list(files.values())
    shown = records[0] if len(records) == 1 else records
    typer.echo(json.dumps(shown, indent=2, allow_nan=False))
    names = ", ".join(str(path) for path in files)
    if not yes:
        if as_json:
            return
        if not sys.stdin.isatty():
            raise SpecError("contribute: nothing is written without a terminal to ask; add --yes")
        if not typer.confirm(f"\nWrite this to {names}?", err=True):
            typer.echo("Nothing was written.", err=True)
            raise typer.Exit(1)
    for path, record in files.items():
        path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    typer.echo(
        f"\nWritten to {names}. Nothing was sent. To contribute it, open a pull request that adds "
        "it to benchmarks/measured/runs.",
        err=True,
    )
