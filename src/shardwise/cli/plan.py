"""`shardwise plan`: recommend a configuration, with the reasons."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import (
    AdapterOption,
    ClusterOption,
    CompileOption,
    DeadlineOption,
    GlobalBatchOption,
    LossOption,
    MeasuredOption,
    ModelOption,
    OffloadActivationsOption,
    OffloadOptimizerOption,
    OffloadOption,
    OptimizerOption,
    PrecisionOption,
    PriceOption,
    SeqLenOption,
    SoftwareOption,
    StackOption,
    StatesOption,
    TokensOption,
)
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
from shardwise.cli.values import lowercase
from shardwise.spec.foreign_text import echo
from shardwise.spec.states import offload_of

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


def plan(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run.toml to start from; its strategy is compared.", show_default=False
        ),
    ] = None,
    current: Annotated[
        Path | None,
        typer.Option(help="Compare with this run.toml or stack's file."),
    ] = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    seq_len: SeqLenOption = None,
    global_batch: GlobalBatchOption = None,
    exact_batch: Annotated[
        bool,
        typer.Option(
            "--exact-batch",
            help="Keep --global-batch exactly; else up to 5% more or less where it divides better.",
        ),
    ] = False,
    optimizer: OptimizerOption = None,
    adapter: AdapterOption = None,
    precision: PrecisionOption = None,
    states: StatesOption = None,
    software: SoftwareOption = None,
    measured: MeasuredOption = None,
    objective: Annotated[
        Goal,
        typer.Option(
            metavar="GOAL", help="What to optimise: throughput, memory, sequence or money."
        ),
    ] = Goal.throughput,
    tokens: TokensOption = None,
    price: PriceOption = None,
    deadline: DeadlineOption = None,
    low_precision_reduce: Annotated[
        bool,
        typer.Option(
            "--allow-low-precision-reduce",
            help="Also try reducing gradients in bf16, which changes the arithmetic.",
        ),
    ] = False,
    loss: LossOption = None,
    offload: OffloadOption = None,
    offload_optimizer: OffloadOptimizerOption = None,
    offload_activations: OffloadActivationsOption = None,
    compile_: CompileOption = None,
    for_stack: StackOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show all that was weighed, with --top layouts.")
    ] = False,
    top: Annotated[int, typer.Option(help="Layouts to show.", min=1, max=50)] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the chosen run.toml here.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
) -> None:
    """Search for the best configuration and explain the choice.

    Exits with 1 if no configuration fits, or none meets the deadline.
    """
    from shardwise.planning.api import plan_run
    from shardwise.planning.money import read_budget
    from shardwise.planning.record import devices_in_time, plan_record
    from shardwise.report.plan import print_plan
    from shardwise.report.plan_explained import print_explained
    from shardwise.report.plan_table import plan_table
    from shardwise.spec.run import replace_run

    form = output_format(as_json, as_csv, as_markdown)
    if output is not None:
        check_output(output, suffix=".toml")
    found, chosen = plan_run(
        model,
        cluster,
        run=run,
        current=current,
        seq_len=seq_len,
        global_batch=global_batch,
        optimizer=lowercase(optimizer),
        adapter=adapter,
        precision=lowercase(precision),
        states=lowercase(states),
        software=lowercase(software),
        measured=measured or (),
        loss=lowercase(loss),
        offload=offload_of(offload, offload_optimizer, offload_activations),
        compile=compile_,
        for_stack=lowercase(for_stack),
        objective=objective.value,
        low_precision_reduce=low_precision_reduce,
        batch_tolerance=0.0 if exact_batch else None,
        in_full=explain or form is not Format.screen,
        budget=read_budget(tokens, price, deadline),
    )
    if output is not None and chosen is not None:
        replace_run(output, chosen.from_weights())
    more = devices_in_time(found)
    if form is Format.json:
        print_json(plan_record(found, lowercase(for_stack), more))
    elif form is not Format.screen:
        print_table(plan_table(found, top), form)
    else:
        start = _start(found, chosen, lowercase(for_stack), output)
        if explain:
            print_explained(found, start, top, more)
        else:
            print_plan(found, start, more)
    _print_unsupported(current)
    if not found.succeeds:
        raise typer.Exit(1)


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
