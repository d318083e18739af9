"""`shardwise fsck`: verify a checkpoint's integrity."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json


def fsck(
    path: Annotated[
        str,
        typer.Argument(
            help="Checkpoint, run folder (path or URL), or .safetensors file.",
            show_default=False,
        ),
    ],
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Most processes that read.", show_default="one per core"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify a checkpoint's integrity.

    Formats: Shardwise, torch DCP and Hugging Face safetensors. Reads every byte that has a
    checksum; executes nothing in the files. Exits with 1 if a checkpoint is broken.
    """
    from shardwise.checkpoint.format.folder import size_of
    from shardwise.checkpoint.verify.fsck import find_checkpoints, verify_checkpoint
    from shardwise.cli.long import prepare_long_run
    from shardwise.report.bytes import bytes_bar
    from shardwise.report.fsck import checked_json, print_checked

    found = find_checkpoints(path)
    prepare_long_run()
    begin = time.monotonic()
    with bytes_bar(sum(map(size_of, found.folders)), quiet=as_json) as progress:
        checked = [verify_checkpoint(folder, progress, processes) for folder in found.folders]
    if as_json:
        checkpoints = [checked_json(one) for one in checked]
        print_json({"schema": 1, "checkpoints": checkpoints, "incomplete": found.incomplete})
    else:
        print_checked(checked, found.incomplete, time.monotonic() - begin)
    if not all(one.intact for one in checked):
        raise typer.Exit(1)
