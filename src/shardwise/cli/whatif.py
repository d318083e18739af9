"""`shardwise whatif`: what other hardware or another job would change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import (
    AdapterOption,
    ClusterOption,
    DeadlineOption,
    GlobalBatchOption,
    ModelOption,
    OptimizerOption,
    PrecisionOption,
    PriceOption,
    SeqLenOption,
    SoftwareOption,
    TokensOption,
)
from shardwise.cli.output import (
    CsvOption,
    Format,
    JsonOption,
    MarkdownOption,
    output_format,
    print_json,
    print_table,
)
from shardwise.cli.values import lowercase, number_or_word

if TYPE_CHECKING:
    from shardwise.planning.money import Budget
    from shardwise.planning.problem import Problem
    from shardwise.planning.threshold import Threshold
    from shardwise.planning.whatif import Point


def whatif(
    run: Annotated[
        Path | None, typer.Argument(help="A run.toml to start from.", show_default=False)
    ] = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="Values to compare: network=100,200,400 (Gbps), memory=40,80 (GiB), "
            "device=A100-80GB,H100-SXM, devices=8,64,512, seq-len=4096,8192 or "
            "global-batch=1M,4M. May be repeated."
        ),
    ] = None,
    least: Annotated[
        str | None,
        typer.Option(
            help="Find the least network, memory, devices or global-batch that meets --for."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--for", help="Target of --least: mfu=45%, step=10s, exposed=1% or days=30."),
    ] = None,
    fixed: Annotated[
        bool,
        typer.Option("--fixed", help="Keep one strategy instead of planning again at each value."),
    ] = False,
    strategy: Annotated[
        str | None, typer.Option(help="Strategy for --fixed; default: that of the run.toml.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences per device and micro-batch, for --fixed.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Activation checkpointing for --fixed: none, selective, full, or a share of "
            "blocks such as 0.5."
        ),
    ] = None,
    seq_len: SeqLenOption = None,
    global_batch: GlobalBatchOption = None,
    optimizer: OptimizerOption = None,
    adapter: AdapterOption = None,
    precision: PrecisionOption = None,
    software: SoftwareOption = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
) -> None:
    """Compare other hardware or other jobs, or find the least that meets a target.

    Exits with 1 if no configuration fits, no value meets the target, or all miss the deadline.
    """
    from shardwise.planning.money import Budget, read_budget
    from shardwise.planning.problem import Problem
    from shardwise.planning.threshold import devices_for_deadline, parse_target
    from shardwise.planning.threshold import find_threshold as find_least
    from shardwise.planning.whatif import study
    from shardwise.report.whatif import studies_table
    from shardwise.spec.question import describe_run
    from shardwise.spec.record import Problems

    form = output_format(as_json, as_csv, as_markdown)
    problems, asked = Problems(), []
    budget, wanted = Budget(), None
    if not fixed and (strategy or micro_batch or recompute):
        problems.found.append(
            "strategy: --strategy, --micro-batch and --recompute need --fixed; without it every "
            "value is planned again"
        )
    for text in vary or []:
        with problems.collect():
            asked.append(_read_vary(text))
    if (least is None) != (target is None):
        problems.found.append(
            "least: give --least and --for together, such as --least network --for mfu=45%"
        )
    if not vary and least is None and target is None:
        problems.found.append("vary: give at least one, such as --vary network=100,200,400")
    with problems.collect():
        budget = read_budget(tokens, price, deadline)
    with problems.collect():
        wanted = parse_target(target, budget.tokens) if target is not None else None
    problems.raise_if_any()
    described = describe_run(
        model,
        cluster,
        strategy,
        run=run,
        seq_len=seq_len,
        global_batch=global_batch,
        optimizer=lowercase(optimizer),
        adapter=adapter,
        precision=lowercase(precision),
        software=lowercase(software),
        micro_batch=micro_batch,
        recompute=number_or_word(recompute),
        planned=not fixed,
    )
    problem = Problem(described.model, described.cluster, described.job, described.strategy)
    budget = budget.with_list_price(described.cluster)
    kept = described.strategy if fixed else None
    studies = [(name, study(problem, name, values, kept)) for name, values in asked]
    found = None
    if least is not None and wanted is not None:
        found = find_least(problem, least, wanted, kept)
    points = [point for _, listed in studies for point in listed]
    points += [found.answer] if found and found.answer else []
    for point in points:
        budget.price_of(point.problem.cluster.device.name)  # refuses a device without a price
    missed = _all_miss_deadline(points, budget)
    more = devices_for_deadline(problem, budget) if missed else None
    if form is Format.json:
        print_json(_as_dict(studies, found, more, budget))
    elif form is Format.screen:
        _print(problem, fixed, studies, found, more, budget)
    else:
        answered = [(f"least {found.name}", [found.answer])] if found and found.answer else []
        print_table(studies_table([*studies, *answered], budget), form)
    nothing_fits = any(all(p.candidate is None for p in listed) for _, listed in studies)
    if nothing_fits or missed or (found is not None and not found.met):
        raise typer.Exit(1)


def _all_miss_deadline(points: list[Point], budget: Budget) -> bool:
    """Whether some points fit and all that fit miss the deadline."""
    speeds = [point.candidate.tokens_per_s for point in points if point.candidate]
    return bool(speeds) and not any(budget.in_time(speed) for speed in speeds)


def _as_dict(
    studies: list[tuple[str, list[Point]]],
    found: Threshold | None,
    more: Threshold | None,
    budget: Budget,
) -> dict[str, object]:
    """The studies, the least value and the missed deadline as a JSON object."""
    return {
        "schema": 1,
        "kind": "predicted",
        "studies": [
            {"vary": name, "points": [point.to_dict(budget) for point in points]}
            for name, points in studies
        ],
        **({"least": found.to_dict(budget)} if found else {}),
        **({"deadline": more.to_dict(budget)} if more else {}),
        **({"list_price": budget.listed._asdict()} if budget.listed else {}),
    }


def _print(
    problem: Problem,
    fixed: bool,
    studies: list[tuple[str, list[Point]]],
    found: Threshold | None,
    more: Threshold | None,
    budget: Budget,
) -> None:
    """Print the heading, each study, the least value, and advice on a missed deadline."""
    from shardwise.report.money import deadline_words
    from shardwise.report.screen import screen
    from shardwise.report.whatif import print_heading, print_study, print_threshold

    print_heading(problem, fixed)
    for name, points in studies:
        print_study(name, points, budget)
    if found is not None:
        print_threshold(found, problem, budget)
    if more is not None:
        screen().print("\n" + deadline_words(more, problem, budget))


def _read_vary(text: str) -> tuple[str, list[str]]:
    """Parse `network=100,200` into a name and its values."""
    from shardwise.spec.record import SpecError

    name, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not found:
        raise SpecError(f"vary: cannot read {text[:60]!r}; write it like network=100,200,400")
    return name.strip().lower().replace("_", "-"), found
