"""`shardwise memory`: analyse memory snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json


def memory(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Snapshots of torch.cuda.memory, raw timelines of torch.profiler, or run folders."
        ),
    ],
    top: Annotated[int, typer.Option(help="Number of owners to show.", min=1, max=500)] = 10,
    device: Annotated[
        int | None, typer.Option(help="Show only this device of a snapshot.", min=0)
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Memory of the GPU, such as 80GiB, to compute the headroom.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="Share of the capacity that should stay free.", min=0, max=1)
    ] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Analyse memory snapshots: peak, owners, leaks, fragmentation."""
    from shardwise.observe.memory.api import memory as analyse
    from shardwise.report.memory import print_memory

    found = analyse(*files, device=device, capacity=capacity, headroom=headroom)
    if as_json:
        print_json(found.to_dict(top))
    else:
        print_memory(found.memories, top, found.capacity_bytes, headroom=headroom)
