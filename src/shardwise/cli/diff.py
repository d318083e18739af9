"""`shardwise diff`: what changed from one profiled run to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json


def diff(
    before: Annotated[Path, typer.Argument(help="A trace of torch.profiler, or a run's folder.")],
    after: Annotated[Path, typer.Argument(help="Another one; of a folder the first rank counts.")],
    top: Annotated[int, typer.Option(help="Differences to show.", min=1, max=500)] = 15,
    as_json: JsonOption = False,
) -> None:
    """Compare two traces or runs: what was added, removed, slower and faster.

    Exits with 1 if a step takes longer beyond noise.
    """
    from shardwise.cli.trace import trace_files
    from shardwise.observe.diff import compare
    from shardwise.observe.summary import summarise
    from shardwise.report.diff import print_diff

    found = compare(
        *(summarise(trace_files([path])[:1], timelines=True).ranks[0] for path in (before, after))
    )
    if as_json:
        print_json(
            {
                "schema": 1,
                "kind": "measured",
                "regressed": found.regressed,
                "before": found.before._asdict(),
                "after": found.after._asdict(),
                "differences": [
                    {
                        **one._asdict(),
                        "before": one.before._asdict(),
                        "after": one.after._asdict(),
                        "delta_ns": one.delta_ns,
                    }
                    for one in found.differences
                ],
            }
        )
    else:
        print_diff(found, top)
    if found.regressed:
        raise typer.Exit(1)
