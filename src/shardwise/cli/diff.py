"""`shardwise trace --against`, once `shardwise diff`: compare two profiled runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json


def diff(
    before: Annotated[Path, typer.Argument(help="A trace of torch.profiler, or a run folder.")],
    after: Annotated[
        Path, typer.Argument(help="The same after the change; of a folder, its first rank.")
    ],
    top: Annotated[int, typer.Option(help="Number of changes to show.", min=1, max=500)] = 15,
    as_json: JsonOption = False,
) -> None:
    """Compare two traces or runs: where the time of a step went, then kernel by kernel.

    Exits with 1 if a step takes longer beyond noise.
    """
    compare_traces(before, after, top, as_json=as_json)


def compare_traces(before: Path, after: Path, top: int, *, as_json: bool) -> None:
    """Print what changed between two traces or runs; exit with 1 if a step takes longer."""
    from shardwise.observe.diff import compare
    from shardwise.observe.run_folder import trace_files
    from shardwise.observe.summary import summarise
    from shardwise.report.diff import print_diff

    paths = [trace_files([path])[0] for path in (before, after)]
    compared = compare(*(summarise([path], timelines=True).ranks[0] for path in paths))
    if as_json:
        print_json(
            {
                "schema": 1,
                "kind": "measured",
                "regressed": compared.regressed,
                "before": compared.before._asdict(),
                "after": compared.after._asdict(),
                "parts": [{**one._asdict(), "delta_ns": one.delta_ns} for one in compared.parts],
                "differences": [
                    {
                        **one._asdict(),
                        "before": one.before._asdict(),
                        "after": one.after._asdict(),
                        "delta_ns": one.delta_ns,
                    }
                    for one in compared.differences
                ],
            }
        )
    else:
        print_diff(compared, top)
    if compared.regressed:
        raise typer.Exit(1)
