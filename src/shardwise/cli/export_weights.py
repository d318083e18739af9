"""`shardwise export-weights`: export the weights of a run for Hugging Face."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, print_json
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.checkpoint.format.folder import Folder


class ExportType(StrEnum):
    """The dtypes that weights can be converted to."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_Run = Annotated[
    str,
    typer.Argument(help="Run folder or one checkpoint (path or URL).", show_default=False),
]
_Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="Folder to write; must be new or empty.", show_default=False
    ),
]
_Step = Annotated[
    int | None, typer.Option(min=0, help="Step to export.", show_default="the newest intact")
]
_Dtype = Annotated[
    ExportType | None,
    typer.Option(help="Convert weights to this dtype.", show_default="as saved"),
]
_Merge = Annotated[
    bool,
    typer.Option("--merge", help="Merge the adapters into the base model.", show_default=False),
]


def export_weights(
    run: _Run,
    output: _Output,
    step: _Step = None,
    dtype: _Dtype = None,
    shard_size: Annotated[str, typer.Option(help="Maximum size of one safetensors file.")] = "5GB",
    merge: _Merge = False,
    as_json: JsonOption = False,
) -> None:
    """Export the weights of a run as a folder that Hugging Face transformers loads.

    Of a run with adapters: the adapters in PEFT's format or, with --merge, the merged model.

    Verifies every byte as it is read and skips corrupt checkpoints. Exits with 1 if no checkpoint
    is intact; then nothing is written.
    """
    from shardwise.cli.long import needs_torch, prepare_long_run

    most = _bytes(shard_size)
    needs_torch()
    from shardwise.checkpoint.export.weights import NotExportedError, check_target, export_first
    from shardwise.report.bytes import bytes_bar
    from shardwise.report.export_weights import print_exported
    from shardwise.trainer.rebuild import rebuild

    check_target(output.resolve())
    found = _checkpoints(run, step)
    prepare_long_run()
    try:
        with bytes_bar(quiet=as_json) as progress:
            exported = export_first(
                found,
                output,
                dtype.value if dtype else None,
                most,
                progress,
                rebuild if merge else None,
            )
    except NotExportedError as error:
        for problem in error.problems:
            echo(f"error: {problem}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        print_json({"schema": 1, **exported._asdict()})
    else:
        print_exported(exported)


def _bytes(text: str) -> int:
    """The bytes of a size such as "5GB"; SpecError if it is none."""
    from shardwise.spec.quantity import QuantityError, parse_bytes
    from shardwise.spec.record import SpecError

    try:
        return parse_bytes(text)
    except QuantityError as error:
        raise SpecError(f"--shard-size: {error}") from None


def _checkpoints(run: str, step: int | None) -> list[Folder]:
    """The checkpoints to try, newest first; only that of `step` if it is given."""
    from shardwise.checkpoint.format.folder import find_folder, is_remote
    from shardwise.checkpoint.format.run_folder import storage_of_run
    from shardwise.checkpoint.format.storage import step_of
    from shardwise.checkpoint.verify.fsck import kind_of
    from shardwise.spec.record import SpecError

    if not is_remote(run):
        if not Path(run).is_dir():
            raise SpecError(f"export-weights: {run} is not a folder; give a run folder")
        run = str(Path(run).resolve())
    folder = find_folder(run)
    kind = kind_of(folder)
    if kind == "shardwise":
        if step not in (None, step_of(run.rstrip("/").rpartition("/")[2])):
            raise SpecError(
                f"--step: {run} is a single checkpoint; give the run folder, or no --step"
            )
        return [folder]
    if kind is not None:
        raise SpecError(f"export-weights: {run} is not a Shardwise checkpoint; give a run folder")
    place = storage_of_run(run)
    steps = place.steps()
    if not steps:
        raise SpecError(
            f"export-weights: {place.url} has no complete checkpoint; give a run folder "
            "with a saved step"
        )
    if step is None:
        return [place.folder(one) for one in reversed(steps)]
    if step not in steps:
        saved = ", ".join(map(str, steps))
        raise SpecError(f"--step: {place.url} has no step {step}; use one of {saved}")
    return [place.folder(step)]
