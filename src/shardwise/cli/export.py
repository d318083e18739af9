"""`shardwise export`: the run for another stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import complete
from shardwise.cli.output import JsonOption, check_output, print_json


def export(
    run: Annotated[Path, typer.Argument(help="The run.toml to write for another stack.")],
    to: Annotated[
        str,
        typer.Option(
            help="accelerate, torchtitan, deepspeed, lightning, python, slurm or kubernetes.",
            autocompletion=complete.stacks,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write it here instead of to the terminal."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run as the configuration of another stack, and list what it cannot express there.

    The file goes to standard output or to --output, the list to standard error.
    """
    from shardwise.cli.values import lowered
    from shardwise.spec.run import read_run
    from shardwise.stacks.write.exports import export_run

    written = export_run(read_run(run).resolved(), lowered(to) or "")
    if output is not None:
        check_output(output, suffix=Path(written.name).suffix)
        output.write_text(written.text, encoding="utf-8")
    if as_json:
        print_json({"schema": 1, **written._asdict()})
        return
    if output is None:
        typer.echo(written.text, nl=False)
    for loss in written.losses:
        typer.echo(f"note: {loss}", err=True)
    typer.echo(f"Start it with: {written.command}", err=True)
