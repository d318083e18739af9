"""`shardwise plan`: recommend a configuration, with the reasons."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import DeadlineOption, PriceOption, StackOption, TokensOption
from shardwise.cli.output import (
    CsvOption,
    Format,
    JsonOption,
    MarkdownOption,
    check_output,
    output_format,
    print_json,
    print_table,
)
from shardwise.cli.settings import takes
from shardwise.cli.values import lowercase
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.planning.plan import Plan
    from shardwise.report.plan import Start
    from shardwise.spec.run import RunSpec


class Goal(StrEnum):
    """What a plan optimises."""

    throughput = "throughput"
    memory = "memory"
    sequence = "sequence"
    money = "money"


_Run = Annotated[
    Path | None,
    typer.Argument(help="A run.toml to start from; its strategy is compared.", show_default=False),
]
_Current = Annotated[
    Path | None,
    typer.Option(help="Compare with this run.toml or stack's file."),
]
_ExactBatch = Annotated[
    bool,
    typer.Option(
        "--exact-batch",
        help="Keep --global-batch exactly; else up to 5% more or less where it divides better.",
    ),
]
_Objective = Annotated[
    Goal,
    typer.Option(metavar="GOAL", help="What to optimise: throughput, memory, sequence or money."),
]
_LowPrecisionReduce = Annotated[
    bool,
    typer.Option(
        "--allow-low-precision-reduce",
        help="Also try reducing gradients in bf16, which changes the arithmetic.",
    ),
]
_Explain = Annotated[
    bool, typer.Option("--explain", help="Show all that was weighed, with --top layouts.")
]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the chosen run.toml here.")
]


@takes(*("model", "cluster", "seq_len", "global_batch", "optimizer", "adapter", "precision"),
       *("states", "software", "measured", "loss", "offload", "offload_optimizer"),
       *("offload_activations", "compile"))  # fmt: skip
def plan(
    run: _Run = None,
    current: _Current = None,
    exact_batch: _ExactBatch = False,
    objective: _Objective = Goal.throughput,
    tokens: TokensOption = None,
    price: PriceOption = None,
    deadline: DeadlineOption = None,
    low_precision_reduce: _LowPrecisionReduce = False,
    for_stack: StackOption = None,
    explain: _Explain = False,
    top: Annotated[int, typer.Option(help="Layouts to show.", min=1, max=50)] = 5,
    output: _Output = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
    **settings: Any,
) -> None:
    """Search for the best configuration and explain the choice.

    Exits with 1 if no configuration fits, or none meets the deadline.
    """
    from shardwise.planning.api import has_parts, plan_run, refuse_for_parts
    from shardwise.planning.money import read_budget
    from shardwise.spec.run import replace_run

    form = output_format(as_json, as_csv, as_markdown)
    if output is not None:
        check_output(output, suffix=".toml")
    stack = lowercase(for_stack)
    if has_parts(settings["cluster"], run):
        refused = {"--objective": objective is not Goal.throughput, "--current": current,
                   "--tokens": tokens, "--price": price, "--deadline": deadline, "--for": stack,
                   "--explain": explain, "--csv": as_csv, "--markdown": as_markdown,
                   "--allow-low-precision-reduce": low_precision_reduce}  # fmt: skip
        refuse_for_parts([name for name, given in refused.items() if given])
        _plan_parts(run, settings, 0.0 if exact_batch else None, output, as_json)
        return
    found, chosen = plan_run(
        run=run,
        current=current,
        for_stack=stack,
        objective=objective.value,
        low_precision_reduce=low_precision_reduce,
        batch_tolerance=0.0 if exact_batch else None,
        in_full=explain or form is not Format.screen,
        budget=read_budget(tokens, price, deadline),
        **settings,
    )
    if output is not None and chosen is not None:
        replace_run(output, chosen.from_weights())
    if form is Format.screen:
        _print(found, _start(found, chosen, stack, output), top if explain else None)
    else:
        _print_data(found, stack, form, top)
    _print_unsupported(current)
    if not found.succeeds:
        raise typer.Exit(1)


def _plan_parts(
    run: Path | None,
    settings: dict[str, Any],
    tolerance: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plan a cluster of unequal parts, and print the plan; exit with 1 where they cannot pay."""
    from shardwise.launch.command import start_command
    from shardwise.planning.api import plan_parts
    from shardwise.report.unequal import print_unequal_plan
    from shardwise.spec.run import replace_run

    found = plan_parts(run=run, batch_tolerance=tolerance, **settings)
    if output is not None and found.chosen is not None:
        replace_run(output, found.chosen.from_weights())
    if as_json:
        print_json(found.to_dict())
    else:
        command = start_command(found.run.cluster, output or Path("run.toml"))
        print_unequal_plan(found, command, str(output) if output else None)
    if found.winner is None:
        raise typer.Exit(1)


def _print(found: Plan, start: Start, explained: int | None) -> None:
    """Print a plan; with all that was weighed and `explained` layouts, unless that is None."""
    from shardwise.planning.record import devices_in_time
    from shardwise.report.plan import print_plan
    from shardwise.report.plan_explained import print_explained

    more = devices_in_time(found)
    if explained is None:
        print_plan(found, start, more)
    else:
        print_explained(found, start, explained, more)


def _print_data(found: Plan, stack: str | None, form: Format, top: int) -> None:
    """Print a plan as JSON, or the table of its `top` layouts."""
    from shardwise.planning.record import devices_in_time, plan_record
    from shardwise.report.plan_table import plan_table

    if form is Format.json:
        print_json(plan_record(found, stack, devices_in_time(found)))
    else:
        print_table(plan_table(found, top), form)


def _start(found: Plan, chosen: RunSpec | None, stack: str | None, output: Path | None) -> Start:
    """The commands that start the plan: here, or in another stack after an export."""
    from shardwise.launch.command import start_command
    from shardwise.report.plan import Start

    written = str(output) if output else None
    toml = output or Path("run.toml")
    if stack is None or chosen is None:
        return Start(start_command(found.problem.cluster, toml), written)
    from shardwise.stacks.write.exports import export_run

    exported = export_run(chosen, stack)
    dtype = chosen.strategy.reduce_dtype
    remark = f"{stack} reduces gradients in {dtype}: this changes the arithmetic."
    export = f"shardwise export {toml} --to {stack}"
    return Start(exported.command, written, export, remark if dtype != "fp32" else "")


def _print_unsupported(current: Path | None) -> None:
    """Print the settings of another stack's file that the comparison ignores."""
    if current is None or current.suffix == ".toml":
        return
    from shardwise.stacks.read.imports import import_file

    for sentence in import_file(current).unsupported:
        echo(f"note: {current.name}: {sentence}", err=True)
