"""`shardwise import`: read another stack's settings into a run.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, check_output, print_json
from shardwise.cli.settings import takes
from shardwise.spec.foreign_text import echo


@takes("model", "cluster")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A YAML of accelerate, TRL, axolotl or LLaMA-Factory, a DeepSpeed JSON, "
            "TrainingArguments or SFTConfig (JSON, YAML or script), a torchtitan configuration "
            "(Python or TOML), or a Python script with FSDP or DDP. Scripts are read, never run."
        ),
    ],
    model: str | None = None,
    cluster: str | None = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="run.toml to write; default: standard output."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read another stack's settings into a run.toml; list settings that are not supported.

    Without --model and --cluster, only the sections that the file settles are printed.
    """
    from shardwise.spec.record import SpecError
    from shardwise.stacks.read.api import import_ as read

    if output is not None:
        check_output(output, suffix=".toml")
    found = read(file, model, cluster)
    missing = [one.words(f"--{one.part}") for one in found.lacks]
    if output is not None:
        if missing:
            raise SpecError(missing)
        output.write_text(found.toml, encoding="utf-8")
    if as_json:
        print_json({"schema": 1, **found.imported.to_dict()})
    elif output is None:
        echo(found.toml, end="")
    else:
        for line in found.summary:
            echo(line)
        echo(f"Written to {output}. Compare with the best plan: shardwise plan {output}")
    for sentence in missing:
        echo(f"note: {sentence}", err=True)
