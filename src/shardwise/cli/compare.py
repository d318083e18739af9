"""`shardwise compare`: benchmark strategies against each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import ProcessesOption, RunFile
from shardwise.cli.output import (
    CsvOption,
    Format,
    JsonOption,
    MarkdownOption,
    output_format,
    print_json,
    print_table,
)
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec
    from shardwise.trials.compare_strategies import NamedRun


def compare(
    run: RunFile,
    strategies: Annotated[
        str,
        typer.Option(help="Strategies, separated by commas: ddp, zero1, zero2, zero3, hsdp, "
                     "zero3:4 for groups of 4."),
    ] = "ddp,zero2,zero3",
    nproc: ProcessesOption = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each strategy.")] = 3,
    steps: Annotated[int, typer.Option(min=8, help="Steps per run.")] = 20,
    folder: Annotated[Path, typer.Option(help="Folder for all runs.")] = Path("runs/compare"),
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
) -> None:  # fmt: skip
    """Benchmark several strategies on the same run.toml and report the fastest.

    All use the same model, data, seed and tokens. Runs alternate and warm-up steps are excluded.
    Exits with 1 if no strategy finished.
    """
    from shardwise.cli.launching import as_short_run, processes_for
    from shardwise.cli.long import needs_torch
    from shardwise.report.compare_strategies import print_scores, scores_table
    from shardwise.spec.run import read_run
    from shardwise.spec.unequal import check_equal

    form = output_format(as_json, as_csv, as_markdown)
    described = check_equal(read_run(run), "compare")
    runs = _runs(as_short_run(described, steps), strategies)
    needs_torch()
    processes = processes_for(described, nproc)
    from shardwise.trials.compare_strategies import compare_strategies

    quiet = form is not Format.screen
    progress = (lambda _: None) if quiet else (lambda text: echo(text, err=True))
    scores = compare_strategies(runs, rounds, processes, folder, progress)
    if form is Format.json:
        print_json({"schema": 1, "kind": "measured", "rounds": rounds,
                    "scores": [score.to_dict() for score in scores]})  # fmt: skip
    elif form is Format.screen:
        print_scores(scores, rounds)
    else:
        print_table(scores_table(scores), form)
    if all(score.median_s is None for score in scores):
        raise typer.Exit(1)


def _runs(described: RunSpec, strategies: str) -> list[NamedRun]:
    """The named strategies as runs; all other settings are those of the run.toml."""
    from shardwise.spec.record import Problems, SpecError
    from shardwise.trials.compare_strategies import NamedRun

    names = list(dict.fromkeys(name.strip() for name in strategies.split(",") if name.strip()))
    if len(names) < 2:
        raise SpecError("strategies: name at least two to compare, such as --strategies ddp,zero3")
    problems = Problems()
    runs = []
    for name in names:
        with problems.collect():
            chosen = described.strategy.as_kind(name)
            runs.append(NamedRun(name, described._replace(strategy=chosen)))
    problems.raise_if_any()
    return runs
