"""`shardwise compare`: strategies run against each other for real."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, print_json
from shardwise.cli.train import ProcessesOption, RunFile

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec
    from shardwise.train.contest import Contender


def compare(
    run: RunFile,
    strategies: Annotated[
        str,
        typer.Option(help="Which, separated by commas; also hsdp, and zero3:4 for groups of 4."),
    ] = "ddp,zero2,zero3",
    nproc: ProcessesOption = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often each runs.")] = 3,
    steps: Annotated[int, typer.Option(min=8, help="Steps of each run.")] = 20,
    folder: Annotated[Path, typer.Option(help="Where all runs are kept.")] = Path("runs/compare"),
    as_json: JsonOption = False,
) -> None:
    """Run a run.toml with each of several strategies, in turns, and say which is fastest.

    The same model, data, seed and tokens for all; the first steps do not count. Exits with 1 if
    none finished.
    """
    from shardwise.cli.long import needs_torch
    from shardwise.cli.train import as_probe, processes_for
    from shardwise.report.contest import print_scores
    from shardwise.spec.run import read_run

    described = read_run(run)
    needs_torch()
    processes = processes_for(described, nproc)
    described = as_probe(described, steps)
    contenders = _contenders(described, strategies)
    from shardwise.train.contest import contest

    quiet = (lambda _: None) if as_json else (lambda text: typer.echo(text, err=True))
    scores = contest(contenders, rounds, processes, folder, quiet)
    if as_json:
        print_json({"schema": 1, "kind": "measured", "rounds": rounds,
                    "scores": [score._asdict() for score in scores]})  # fmt: skip
    else:
        print_scores(scores, rounds)
    if all(score.median_s is None for score in scores):
        raise typer.Exit(1)


def _contenders(described: RunSpec, strategies: str) -> list[Contender]:
    """One run per strategy; what the run.toml says besides the kind and its groups stays."""
    from shardwise.spec.record import Problems, SpecError
    from shardwise.train.contest import Contender

    names = list(dict.fromkeys(name.strip() for name in strategies.split(",") if name.strip()))
    if len(names) < 2:
        raise SpecError("--strategies: name at least two, such as ddp,zero3")
    problems = Problems()
    found = []
    for name in names:
        with problems.collect():
            chosen = described.strategy.as_kind(name)
            found.append(Contender(name, described._replace(strategy=chosen)))
    problems.raise_if_any()
    return found
