"""`shardwise export`: write a run for another stack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import complete
from shardwise.cli.output import JsonOption, check_output, print_json
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.report.exported import Figures
    from shardwise.spec.run import RunSpec
    from shardwise.spec.strategy import Strategy
    from shardwise.stacks.write.edit import Edit
    from shardwise.stacks.write.exported import Exported, Target


_To = Annotated[
    str,
    typer.Option(
        help="accelerate, trainer (transformers), trl, axolotl, llama-factory, deepspeed, "
        "torchtitan, megatron-bridge, lightning, python, slurm or kubernetes.",
        autocompletion=complete.stacks,
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write; default: standard output."),
]
_Against = Annotated[
    Path | None,
    typer.Option(help="A file of yours for the same stack: print what to edit in it instead."),
]
_Partition = Annotated[str | None, typer.Option(help="Slurm partition; default: the cluster's.")]
_Account = Annotated[str | None, typer.Option(help="Slurm account to charge; default: the user's.")]
_Time = Annotated[
    str | None,
    typer.Option(
        help="Time limit, HH:MM:SS or D-HH:MM:SS; default: 24:00:00 for Slurm, none for Kubernetes."
    ),
]
_Env = Annotated[
    list[str] | None,
    typer.Option(
        help="Variable of the job's environment, NAME=VALUE; repeat it for more.",
        show_default=False,
    ),
]
_Setup = Annotated[
    list[str] | None,
    typer.Option(
        help="Command before a Slurm job starts training, such as 'module load cuda'; repeat "
        "it for more.",
        show_default=False,
    ),
]
_Spares = Annotated[int, typer.Option(min=0, help="Nodes that wait until one that trains is lost.")]


def export(
    run: Annotated[Path, typer.Argument(help="The run.toml to export.")],
    to: _To,
    output: _Output = None,
    against: _Against = None,
    partition: _Partition = None,
    account: _Account = None,
    time: _Time = None,
    env: _Env = None,
    setup: _Setup = None,
    spares: _Spares = 0,
    image: Annotated[str | None, typer.Option(help="Image of Kubernetes' containers.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run for another stack; show its figures there and what it cannot express.

    The file goes to standard output or to --output, the rest to standard error. Memory, step time
    and tokens/s are predicted for the strategy as the stack runs it.
    """
    from shardwise.cli.values import lowercase
    from shardwise.report.exported import exported_dict, print_exported
    from shardwise.report.screen import plain_console
    from shardwise.spec.run import read_run
    from shardwise.spec.unequal import check_equal
    from shardwise.stacks.write.exported import Target
    from shardwise.stacks.write.exports import export_run

    stack = lowercase(to) or ""
    target = Target(
        file=str(output) if output else None,
        run_file=str(run),
        partition=partition,
        account=account,
        time=time,
        environment=_variables(env or []),
        setup=tuple(setup or ()),
        spares=spares,
        image=image,
    )
    _check_accepted_options(stack, target)
    described = check_equal(read_run(run), "export", "shardwise train runs it as it is").resolved()
    written = export_run(described, stack, target)
    if output is not None:
        check_output(output, suffix=Path(written.name).suffix)
        output.write_text(written.text, encoding="utf-8")
    figures, problem = _predicted(described, written.applied, stack)
    changes = None if against is None else _edits(described, written, stack, against)
    if as_json:
        edits = {} if changes is None else {"edits": [one.to_dict() for one in changes]}
        print_json({**exported_dict(written, described, figures), **edits})
        return
    if changes is not None:
        _print_edits(changes, str(against))
    elif output is None:
        echo(written.text, end="")
    figured = figures, stack, target.file, changes is not None
    print_exported(written, described, *figured, console=plain_console(stderr=True))
    if problem:
        echo(f"note: figures are not predicted: {problem}", err=True)


def _edits(run: RunSpec, written: Exported, stack: str, file: Path) -> list[Edit]:
    """What to edit in the user's file instead; `stacks` reads it only when asked."""
    from shardwise.stacks.write.edits import edits_of

    return edits_of(run, written, stack, file)


def _print_edits(changes: list[Edit], file: str) -> None:
    """Print what to edit in the user's file, one key per line."""
    echo(f"Edit {file}:" if changes else f"{file} needs no edit.")
    for one in changes:
        echo(f"  {one.words}")


# By option of a job: the schedulers that accept it.
_SCHEDULERS = {
    "partition": ("slurm",),
    "account": ("slurm",),
    "setup": ("slurm",),
    "image": ("kubernetes",),
    "time": ("slurm", "kubernetes"),
    "environment": ("slurm", "kubernetes"),
    "spares": ("slurm", "kubernetes"),
}


def _check_accepted_options(stack: str, target: Target) -> None:
    """Raise SpecError for options that this stack does not accept."""
    from shardwise.spec.record import SpecError

    problems = [
        f"--{'env' if field == 'environment' else field}: only "
        f"{' and '.join(f'--to {one}' for one in takers)} take{'s' * (len(takers) == 1)} it; leave "
        "it out"
        for field, takers in _SCHEDULERS.items()
        if getattr(target, field) and stack not in takers
    ]
    if problems:
        raise SpecError(problems)


def _variables(texts: list[str]) -> dict[str, str]:
    """Parse texts like NAME=VALUE into a dict; SpecError for others."""
    from shardwise.spec.record import SpecError

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"--env: cannot read {text[:60]!r}; write NAME=VALUE")
        found[name] = value
    return found


def _predicted(run: RunSpec, applied: Strategy, stack: str) -> tuple[Figures | None, str]:
    """Predictions for the run as planned and as the stack runs it; or None and why."""
    from shardwise.predict.api import estimate_run
    from shardwise.report.exported import Figures
    from shardwise.spec.record import SpecError
    from shardwise.stacks.experts import with_base_of
    from shardwise.stacks.write.exports import shards_along_rows

    try:
        planned = estimate_run(run)
        there = planned
        along_rows = shards_along_rows(stack)
        stored = with_base_of(stack, run)
        if applied != run.strategy or along_rows or stored.adapter != run.adapter:
            there = estimate_run(stored._replace(strategy=applied), along_rows=along_rows)
    except SpecError as error:
        return None, error.problems[0]
    return Figures(planned, there), ""
