"""Options that several commands share, besides the settings of a question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import complete

RunFile = Annotated[Path, typer.Argument(help="The run.toml.", show_default=False)]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, help="Processes on this machine; default: the cluster's GPUs per node."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Name of the run's folder; default: the file's name and the time."),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        help="Tokens to train on, such as 1T; adds the time and, with a price, the cost.",
    ),
]
PriceOption = Annotated[
    str | None,
    typer.Option(
        "--price",
        help="Price per GPU-hour: 2.5, or per device: H100-SXM=2.5,A100-80GB=1.6.",
    ),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option("--deadline", help="Days by which all of --tokens must be trained."),
]
StackOption = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="STACK",
        help="Search only what this stack of 'export --to' can run. Default: what Shardwise can.",
        autocompletion=complete.stacks,
    ),
]
