"""`shardwise fsck`: whether a checkpoint is whole and is what was saved."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json


def fsck(
    path: Annotated[
        str,
        typer.Argument(
            help="A checkpoint or a run's folder, or their URL; a .safetensors file.",
            show_default=False,
        ),
    ],
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that read, at most.", show_default="one a core"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Whether a checkpoint is whole and is what was saved.

    Ours, torch's DCP, or Hugging Face safetensors. Every byte that has a
    checksum is read once; nothing in it is run. Exits with 1 if it is broken.
    """
    from shardwise.checkpoint.format.folder import size_of
    from shardwise.checkpoint.verify.fsck import check, find_checkpoints
    from shardwise.cli.long import long_command
    from shardwise.report.bytes import bytes_bar
    from shardwise.report.fsck import checked_json, print_checked

    found = find_checkpoints(path)
    long_command()
    begin = time.monotonic()
    with bytes_bar(sum(map(size_of, found.folders)), quiet=as_json) as progress:
        checked = [check(folder, progress, processes) for folder in found.folders]
    if as_json:
        checkpoints = [checked_json(one) for one in checked]
        print_json({"schema": 1, "checkpoints": checkpoints, "beside": found.beside})
    else:
        print_checked(checked, found.beside, time.monotonic() - begin)
    if not all(one.intact for one in checked):
        raise typer.Exit(1)
