"""`shardwise export-weights`: the weights of a run, for Hugging Face."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.checkpoint.format.folder import Folder


class ExportType(StrEnum):
    """What weights may be converted to."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def export_weights(
    run: Annotated[
        str,
        typer.Argument(help="A run's folder, or one checkpoint; or their URL.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(min=0, help="The save of this step.", show_default="the newest")
    ] = None,
    dtype: Annotated[
        ExportType | None, typer.Option(help="Convert weights to it.", show_default="as trained")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Most bytes of one safetensors file.")] = "5GB",
    as_json: JsonOption = False,
) -> None:
    """Write the weights of a run as a folder that Hugging Face transformers loads.

    Every byte is verified as it is read. A newest checkpoint that is not whole is passed over.
    Exits with 1 if none is whole; then nothing is written.
    """
    from shardwise.cli.long import long_command, needs_torch
    from shardwise.spec.quantity import QuantityError, parse_bytes
    from shardwise.spec.record import SpecError

    try:
        most = parse_bytes(shard_size)
    except QuantityError as error:
        raise SpecError(f"--shard-size: {error}") from None
    needs_torch()
    from shardwise.checkpoint.export.weights import NotExportedError, check_target, export_first
    from shardwise.report.bytes import bytes_bar
    from shardwise.report.export_weights import print_exported

    check_target(output.resolve())
    found = _checkpoints(run, step)
    long_command()
    try:
        with bytes_bar(quiet=as_json) as progress:
            exported = export_first(found, output, dtype.value if dtype else None, most, progress)
    except NotExportedError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        print_json({"schema": 1, **exported._asdict()})
    else:
        print_exported(exported)


def _checkpoints(run: str, step: int | None) -> list[Folder]:
    """Those that may be exported, the one to be tried first in front."""
    from shardwise.checkpoint.format.folder import find_folder, is_remote
    from shardwise.checkpoint.format.place import step_of
    from shardwise.checkpoint.format.run_folder import place_of_run
    from shardwise.checkpoint.verify.fsck import kind_of
    from shardwise.spec.record import SpecError

    if not is_remote(run):
        if not Path(run).is_dir():
            raise SpecError(f"export-weights: there is no folder {run}")
        run = str(Path(run).resolve())
    folder = find_folder(run)
    kind = kind_of(folder)
    if kind == "shardwise":
        if step not in (None, step_of(run.rstrip("/").rpartition("/")[2])):
            raise SpecError(f"--step: {run} is one checkpoint; name the run's folder, or no step")
        return [folder]
    if kind is not None:
        raise SpecError(f"export-weights: {run} is no checkpoint of a Shardwise run")
    place = place_of_run(run)
    steps = place.steps()
    if not steps:
        raise SpecError(f"export-weights: there is no finished checkpoint in {place.url}")
    if step is None:
        return [place.folder(one) for one in reversed(steps)]
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise SpecError(f"--step: {step} is not in {place.url}; there are {there}")
    return [place.folder(step)]
