"""`shardwise whatif`: what other hardware or another job would change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import (
    ClusterOption,
    GlobalBatchOption,
    ModelOption,
    OptimizerOption,
    PrecisionOption,
    PriceOption,
    SeqLenOption,
    TokensOption,
)
from shardwise.cli.output import JsonOption, print_json
from shardwise.cli.values import lowered, number_or_word


def whatif(
    run: Annotated[
        Path | None, typer.Argument(help="A run.toml to start from.", show_default=False)
    ] = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="network=100,200,400 (Gbps), memory=40,80 (GiB), device=A100-80GB,H100-SXM, "
            "devices=8,64,512, seq-len=4096,8192 or global-batch=1M,4M. May be repeated."
        ),
    ] = None,
    least: Annotated[
        str | None,
        typer.Option(help="Find the least network, memory, devices or global-batch; with --for."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--for", help="Its target: mfu=45%, step=10s or exposed=1%.")
    ] = None,
    fixed: Annotated[
        bool,
        typer.Option("--fixed", help="Keep the strategy instead of planning anew at each point."),
    ] = False,
    strategy: Annotated[
        str | None, typer.Option(help="What --fixed keeps, if not the strategy of the run.toml.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences per device at a time, for --fixed.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="none, selective, full, or a share such as 0.5, for --fixed."),
    ] = None,
    seq_len: SeqLenOption = None,
    global_batch: GlobalBatchOption = None,
    optimizer: OptimizerOption = None,
    precision: PrecisionOption = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Vary the hardware or the job and see what changes, or find the least that is enough.

    Exits with 1 if nothing fits or no value is enough.
    """
    from shardwise.api import describe_run, read_budget
    from shardwise.planning.problem import Problem
    from shardwise.planning.whatif import least as find_least
    from shardwise.planning.whatif import parse_target, study
    from shardwise.report.whatif import print_heading, print_solved, print_study
    from shardwise.spec.record import SpecError

    described = describe_run(
        model,
        cluster,
        strategy,
        run=run,
        seq_len=seq_len,
        global_batch=global_batch,
        optimizer=lowered(optimizer),
        precision=lowered(precision),
        micro_batch=micro_batch,
        recompute=number_or_word(recompute),
    )
    problem = Problem(described.model, described.cluster, described.job, described.strategy)
    budget = read_budget(tokens, price)
    kept = described.strategy if fixed else None
    if not fixed and (strategy or micro_batch or recompute):
        raise SpecError("strategy: goes with --fixed; without it every point is planned anew")
    asked = [_asked(text) for text in vary or []]
    if (least is None) != (target is None):
        raise SpecError(
            "least: needs --for, and --for needs --least: --least network --for mfu=45%"
        )
    if not asked and least is None:
        raise SpecError("vary: give at least one, such as --vary network=100,200,400")
    studies = [(name, study(problem, name, values, kept)) for name, values in asked]
    solved = None
    if least is not None and target is not None:
        solved = find_least(problem, least, parse_target(target), kept)
    if as_json:
        told: dict[str, object] = {
            "schema": 1,
            "kind": "predicted",
            "studies": [
                {"vary": name, "points": [point.to_dict() for point in points]}
                for name, points in studies
            ],
        }
        if solved is not None:
            answer = solved.point
            told["least"] = {
                "quantity": solved.name,
                "for": target,
                "answer": answer.to_dict() if answer else None,
            }
        print_json(told)
    else:
        print_heading(problem, fixed)
        for name, points in studies:
            print_study(name, points, budget)
        if solved is not None:
            print_solved(solved)
    unmet = solved is not None and solved.point is None
    if unmet or any(all(p.candidate is None for p in points) for _, points in studies):
        raise typer.Exit(1)


def _asked(text: str) -> tuple[str, list[str]]:
    from shardwise.spec.record import SpecError

    name, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not found:
        raise SpecError(f"vary: cannot read {text[:60]!r}; write it like network=100,200,400")
    return name.strip().lower().replace("_", "-"), found
