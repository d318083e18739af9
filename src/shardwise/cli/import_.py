"""`shardwise import`: read another stack's settings into a run.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import ClusterOption, ModelOption
from shardwise.cli.output import JsonOption, check_output, print_json
from shardwise.spec.foreign_text import echo


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A YAML of accelerate, TRL, axolotl or LLaMA-Factory, a DeepSpeed JSON, "
            "TrainingArguments or SFTConfig (JSON, YAML or script), or a Python script with FSDP "
            "or DDP. Scripts are read, never run."
        ),
    ],
    model: ModelOption = None,
    cluster: ClusterOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="run.toml to write; default: standard output."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read another stack's settings into a run.toml; list settings that are not supported.

    Without --model and --cluster, only the sections that the file settles are printed.
    """
    from shardwise.report.imported import import_summary, imported_toml
    from shardwise.spec.lookup import find_cluster, find_model
    from shardwise.spec.record import Problems
    from shardwise.stacks.outcomes import Outcome
    from shardwise.stacks.read.imports import (
        ask_for_cluster,
        import_file,
        imported_cluster,
        imported_run,
        other_size,
    )

    if output is not None:
        check_output(output, suffix=".toml")
    imported = import_file(file)
    where = cluster or imported_cluster(imported)
    missing = [] if model else ["model: the file does not name it; give --model, such as gpt2"]
    missing += [] if where else [ask_for_cluster(imported)]
    run = None
    problems = Problems()
    with problems.collect():
        chosen_model = find_model(model) if model else None
    with problems.collect():
        chosen_cluster = find_cluster(where) if where else None
    problems.found += missing if output is not None else []
    problems.raise_if_any()
    if chosen_model is not None and chosen_cluster is not None:
        run = imported_run(imported, chosen_model, chosen_cluster)
    difference = other_size(imported, chosen_cluster) if chosen_cluster is not None else None
    if difference is not None:
        imported = imported._replace(outcomes=(*imported.outcomes, Outcome("lost", why=difference)))
    text = imported_toml(imported, file.name, run)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"schema": 1, **imported.to_dict()})
    elif output is None:
        echo(text, end="")
    else:
        for line in import_summary(imported, file.name):
            echo(line)
        echo(f"Written to {output}. Compare with the best plan: shardwise plan {output}")
    for sentence in missing:
        echo(f"note: {sentence}", err=True)
